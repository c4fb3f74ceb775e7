/* Channels-last convolutions with 3 x 3 kernels, stride 1 and padding 1, on CPUs with AVX2, by
   Winograd's minimal filtering algorithm F(2 x 2, 3 x 3) (Lavin & Gray 2016):

       Y = A' [ (G g G') . (B' d B) ] A

   for each 4 x 4 tile d of the input and 2 x 2 tile Y of the output: 16 matrix products of tiles by
   channels instead of 36. Its factors are 0, 1 and 1/2, so that rounding errors are about those of
   the direct sum. The gradient with respect to the input is the same convolution with the kernels
   rotated by 180 degrees, and channels and filters exchanged.

   A block of tiles is transformed, multiplied and transformed back while it is in the cache. Every
   tile goes through the same operations in the same order, so the result depends neither on the
   number of threads nor on the other images of the batch, down to the bit. */

#include "common.h"

#define TILES 48 /* of a block; a multiple of GROUP */
#define POINTS 16
#define SKEW 16 /* values between matrices, so that they do not compete for the same cache lines */



/* The same as in kernel.py. */
typedef struct {
    int64_t images, height, width, ins, outs;
} Shape;

/* G g G' of eight kernels side by side. */
FAST static void transform_kernels(Lanes g[3][3], Lanes u[POINTS])
{
    Lanes t[4][3];
    UNROLL for (int j = 0; j < 3; j++)
    {
        const Lanes ends = g[0][j] + g[2][j];
        t[0][j] = g[0][j];
        t[1][j] = 0.5f * (ends + g[1][j]);
        t[2][j] = 0.5f * (ends - g[1][j]);
        t[3][j] = g[2][j];
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        const Lanes ends = t[i][0] + t[i][2];
        u[4 * i] = t[i][0];
        u[4 * i + 1] = 0.5f * (ends + t[i][1]);
        u[4 * i + 2] = 0.5f * (ends - t[i][1]);
        u[4 * i + 3] = t[i][2];
    }
}

/* Transforms kernels [filters][3][3][channels] to u [16][outs / 16][ins][16]. */
FAST static void prepare(const float *kernels, float *u, const Shape *s, int turned, int threads)
{
    const int64_t outs = s->outs, ins = s->ins;
    const int64_t filters = turned ? ins : outs, channels = turned ? outs : ins;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t k = 0; k < filters; k += turned ? 1 : OUTS) {
        for (int64_t c = 0; c < channels; c += 8) {
            float turn[POINTS][8][OUTS]; /* outs next to one another */
            for (int64_t f = 0; f < (turned ? 1 : OUTS); f++) {
                const float *from = kernels + (k + f) * 9 * channels + c;
                Lanes g[3][3], w[POINTS];
                for (int i = 0; i < 3; i++)
                    for (int j = 0; j < 3; j++)
                        g[i][j] = at(from + (turned ? 8 - 3 * i - j : 3 * i + j) * channels);
                transform_kernels(g, w);
                for (int e = 0; e < POINTS; e++) {
                    if (turned)
                        put(u + ((e * outs / OUTS + c / OUTS) * ins + k) * OUTS + c % OUTS, w[e]);
                    else
                        for (int i = 0; i < 8; i++)
                            turn[e][i][f] = w[e][i];
                }
            }
            for (int e = 0; !turned && e < POINTS; e++)
                memcpy(u + ((e * outs + k) * ins) + c * OUTS, turn[e], sizeof turn[e]);
        }
    }
}

/* B' d B for all channels of a tile, whose 16 values are at `from`; points are `gap` apart. */
FAST static void transform_tile(const float *const *from, float *v, int64_t ins, int64_t gap)
{
    for (int64_t c = 0; c < ins; c += 8) {
        Lanes d[POINTS], t[POINTS];
        UNROLL for (int i = 0; i < POINTS; i++) d[i] = at(from[i] + c);
        UNROLL for (int j = 0; j < 4; j++)
        {
            t[j] = d[j] - d[8 + j];
            t[4 + j] = d[4 + j] + d[8 + j];
            t[8 + j] = d[8 + j] - d[4 + j];
            t[12 + j] = d[4 + j] - d[12 + j];
        }
        UNROLL for (int i = 0; i < POINTS; i += 4)
        {
            put(v + i * gap + c, t[i] - t[i + 2]);
            put(v + (i + 1) * gap + c, t[i + 1] + t[i + 2]);
            put(v + (i + 2) * gap + c, t[i + 2] - t[i + 1]);
            put(v + (i + 3) * gap + c, t[i + 1] - t[i + 3]);
        }
    }
}

/* Writes A' m A plus the bias to the four values of a tile, for all filters. */
FAST static void transform_back(const float *m, const float *bias, float *const *to, int64_t outs,
                                int64_t gap)
{
    for (int64_t k = 0; k < outs; k += 8) {
        const Lanes zero = {0}, b = bias ? at(bias + k) : zero;
        Lanes r[2][4];
        UNROLL for (int j = 0; j < 4; j++)
        {
            const float *column = m + j * gap + k;
            const Lanes m1 = at(column + 4 * gap), m2 = at(column + 8 * gap);
            r[0][j] = at(column) + m1 + m2;
            r[1][j] = m1 - m2 - at(column + 12 * gap);
        }
        UNROLL for (int i = 0; i < 2; i++)
        {
            put(to[2 * i] + k, r[i][0] + r[i][1] + r[i][2] + b);
            put(to[2 * i + 1] + k, r[i][1] - r[i][2] - r[i][3] + b);
        }
    }
}

static __thread Room for_kernels, for_blocks;

/* y = x * kernels + bias or, if `turned`, the gradient with respect to the input of such a convolution
   whose output has gradient x. `ins` and `outs`, the channels of x and y, must be multiples of 16.
   Returns 0 if memory runs out. */
FAST int dat_convolve(const float *x, const float *kernels, const float *bias, float *y,
                      const Shape *s, int32_t turned, int32_t threads)
{
    float *const u = room(&for_kernels, POINTS * s->ins * s->outs);
    if (!u)
        return 0;
    prepare(kernels, u, s, turned, threads);
    const int64_t down = (s->height + 1) / 2, across = (s->width + 1) / 2;
    const int64_t all = s->images * down * across, blocks = (all + TILES - 1) / TILES;
    const int64_t gap_in = TILES * s->ins + SKEW, gap_out = TILES * s->outs + SKEW;
    int enough = 1;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : enough)
    for (int64_t block = 0; block < blocks; block++) {
        float *v = room(&for_blocks, POINTS * (gap_in + gap_out) + s->ins + s->outs);
        if (!v) {
            enough = 0;
            continue;
        }
        float *m = v + POINTS * gap_in, *zeros = m + POINTS * gap_out, *unread = zeros + s->ins;
        const int64_t first = block * TILES, count = all - first < TILES ? all - first : TILES;
        const int64_t full = (count + GROUP - 1) / GROUP * GROUP; /* the last ones are ignored */
        memset(zeros, 0, (size_t)s->ins * sizeof(float));
        for (int e = 0; count < full && e < POINTS; e++)
            memset(v + e * gap_in + count * s->ins, 0, (size_t)((full - count) * s->ins) * sizeof(float));
        for (int64_t t = 0; t < count; t++) {
            const int64_t n = (first + t) / (down * across);
            const int64_t top = (first + t) / across % down * 2 - 1, left = (first + t) % across * 2 - 1;
            const float *from[POINTS];
            for (int64_t i = 0; i < 4; i++)
                for (int64_t j = 0; j < 4; j++) {
                    const int64_t p = top + i, q = left + j;
                    const int inside = p >= 0 && p < s->height && q >= 0 && q < s->width;
                    from[4 * i + j] =
                        inside ? x + ((n * s->height + p) * s->width + q) * s->ins : zeros;
                }
            transform_tile(from, v + t * s->ins, s->ins, gap_in);
        }
        for (int e = 0; e < POINTS; e++)
            for (int64_t k = 0; k < s->outs; k += OUTS)
                multiply(v + e * gap_in, u + (e * s->outs + k) * s->ins, m + e * gap_out + k, full,
                         s->ins, s->outs);
        for (int64_t t = 0; t < count; t++) {
            const int64_t n = (first + t) / (down * across);
            const int64_t top = (first + t) / across % down * 2, left = (first + t) % across * 2;
            float *to[4];
            for (int64_t i = 0; i < 2; i++)
                for (int64_t j = 0; j < 2; j++) {
                    const int64_t p = top + i, q = left + j;
                    const int inside = p < s->height && q < s->width;
                    to[2 * i + j] =
                        inside ? y + ((n * s->height + p) * s->width + q) * s->outs : unread;
                }
            transform_back(m + t * s->outs, bias, to, s->outs, gap_out);
        }
    }
    return enough;
}
