/* The gradient with respect to an input of few channels, channels last, on CPUs with AVX2: that of a
   network's first layer, at the end of every backward pass of an attack. torch spends as much time on
   one channel as on eight.

   Each output position contributes its gradient times the weights, a row of
   kernel_height * kernel_width * channels values, which is added to the input positions under the
   kernel. An image is summed by one thread, position after position. */

#include "common.h"

static __thread Room for_weights, for_image;

/* Adds the contributions of an output row to the padded image, whose rows have `line` values. */
FAST static void add_row(const Layer *s, const float *shares, int64_t wide, float *image, int64_t line)
{
    const int64_t reach = s->kernel_width * s->channels, step = s->stride * s->channels;
    for (int64_t i = 0; i < s->kernel_height; i++) {
        float *to = image + i * line;
        const float *from = shares + i * reach;
        for (int64_t q = 0; q < s->columns; q++, to += step, from += wide)
            for (int64_t v = 0; v < reach; v++)
                to[v] += from[v];
    }
}

/* From g [images][rows][columns][filters] and w [filters][kernel_height][kernel_width][channels] to
   out [images][height][width][channels]. Returns 0 if memory runs out. */
FAST int dat_input_gradient(const float *g, const float *w, float *out, const Layer *s, int32_t threads)
{
    const int64_t reach = s->kernel_height * s->kernel_width * s->channels;
    const int64_t wide = (reach + OUTS - 1) / OUTS * OUTS, k = s->filters;
    const int64_t line = (s->width + 2 * s->padding + s->kernel_width) * s->channels;
    const int64_t lines = s->height + 2 * s->padding + s->kernel_height;
    const int64_t whole = s->columns / GROUP * GROUP, rest = s->columns - whole;
    float *const u = room(&for_weights, k * wide);
    if (!u)
        return 0;
    for (int64_t v = 0; v < wide; v++) /* u [wide / 16][filters][16] */
        for (int64_t f = 0; f < k; f++)
            u[(v / OUTS * k + f) * OUTS + v % OUTS] = v < reach ? w[f * reach + v] : 0;
    int enough = 1;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : enough)
    for (int64_t n = 0; n < s->images; n++) {
        float *image = room(&for_image, lines * line + (s->columns + GROUP) * wide + GROUP * k);
        if (!image) {
            enough = 0;
            continue;
        }
        float *shares = image + lines * line, *last = shares + (s->columns + GROUP) * wide;
        memset(image, 0, (size_t)(lines * line) * sizeof(float));
        memset(last, 0, (size_t)(GROUP * k) * sizeof(float));
        for (int64_t p = 0; p < s->rows; p++) {
            const float *row = g + (n * s->rows + p) * s->columns * k;
            memcpy(last, row + whole * k, (size_t)(rest * k) * sizeof(float));
            for (int64_t v = 0; v < wide; v += OUTS) {
                multiply(row, u + v * k, shares + v, whole, k, wide);
                if (rest)
                    multiply(last, u + v * k, shares + whole * wide + v, GROUP, k, wide);
            }
            add_row(s, shares, wide, image + p * s->stride * line, line);
        }
        const float *inner = image + s->padding * (line + s->channels);
        const int64_t width = s->width * s->channels;
        for (int64_t p = 0; p < s->height; p++)
            memcpy(out + (n * s->height + p) * width, inner + p * line, (size_t)width * sizeof(float));
    }
    return enough;
}
