/* The weight gradient of a channels-last convolution, on CPUs with AVX2.

   dW[k, i, j, c] is the sum over all images and output positions (p, q) of

       g[n, p, q, k] * x[n, p * stride + i - padding, q * stride + j - padding, c]

   A block of positions is copied so that values used together are adjacent: the input in tiles of 6
   or 4 channels with zero padding, the output gradient in tiles of 16 filters. A unit of work is 16
   filters, a tile of channels and one (i, j): its sums stay in registers for a whole block, and all
   (i, j) find their block in the cache. Each unit is summed by one thread, block after block, so the
   result does not depend on the number of threads, down to the bit. */

#include <omp.h>

#include "common.h"

#define FILTERS 16 /* of a tile */
#define CHANNELS 6 /* of a tile, at most */
#define PLACES 512 /* of a block, about */
#define UNIT (FILTERS * CHANNELS)

typedef struct {
    int64_t first, size;
} Tile;

/* How the positions are split into blocks, and where their copies are stored. */
typedef struct {
    Tile *tiles;
    int64_t count, deep, units;         /* tiles of channels, channels in them, units of work */
    int64_t images, rows;               /* of a block, in the output */
    int64_t in_rows, in_columns, spots; /* of a block, in the input; all of them */
    int64_t places;                     /* of a block, in the output */
    float *x, *g, *sums;
} Plan;

int dat_version(void) { return 1; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Splits channels into tiles of six and four; returns their number. The last tile may be padded. */
static int64_t cut(int64_t channels, Tile *tiles)
{
    int64_t count = 0;
    for (int64_t first = 0; first < channels; count++) {
        const int64_t left = channels - first, size = left % 6 == 0 || left >= 10 ? 6 : 4;
        if (tiles)
            tiles[count] = (Tile){first, size};
        first += size;
    }
    return count;
}

static __thread Room kept;

/* Returns 0 if memory runs out. */
static int make(Plan *plan, const Layer *s)
{
    const int64_t all = s->rows * s->columns;
    plan->count = cut(s->channels, NULL);
    plan->deep = (s->channels + 3) / 2 * 2; /* at most */
    plan->units = s->filters / FILTERS * plan->count * s->kernel_height * s->kernel_width;
    plan->rows = all < PLACES ? s->rows : most(1, PLACES / s->columns);
    plan->images = all < PLACES ? least(s->images, PLACES / all) : 1;
    plan->in_rows = (plan->rows - 1) * s->stride + s->kernel_height;
    plan->in_columns = (s->columns - 1) * s->stride + s->kernel_width;
    plan->spots = plan->images * plan->in_rows * plan->in_columns;
    plan->places = plan->images * plan->rows * s->columns;
    const int64_t tiles = plan->count * (int64_t)(sizeof(Tile) / sizeof(float));
    const int64_t ends[] = {plan->units * UNIT, plan->places * s->filters, plan->spots * plan->deep};
    plan->sums = room(&kept, ends[0] + ends[1] + ends[2] + tiles + 16);
    if (!plan->sums)
        return 0;
    plan->g = plan->sums + ends[0];
    plan->x = plan->g + ends[1];
    plan->tiles = (Tile *)(plan->x + (ends[2] + 15) / 16 * 16);
    cut(s->channels, plan->tiles);
    return 1;
}

/* Copies one row of the input, tile by tile, with zero padding. */
FAST static void copy_row(const Plan *plan, const Layer *s, const float *x, int64_t image,
                          int64_t up, int64_t spot)
{
    const int inside = up >= 0 && up < s->height;
    const int64_t from = inside ? least(s->padding, plan->in_columns) : plan->in_columns;
    const int64_t to = most(from, least(plan->in_columns, s->padding + s->width));
    const float *row = x + ((image * s->height + up) * s->width - s->padding) * s->channels;
    for (int64_t t = 0; t < plan->count; t++) {
        const Tile tile = plan->tiles[t];
        float *out = plan->x + tile.first * plan->spots + spot * tile.size;
        memset(out, 0, (size_t)(from * tile.size) * sizeof(float));
        for (int64_t q = from; q < to; q++) {
            const float *at = row + q * s->channels + tile.first;
            float *place = out + q * tile.size;
            if (tile.size == 6)
                memcpy(place, at, 6 * sizeof(float));
            else if (tile.first + 4 <= s->channels)
                memcpy(place, at, 4 * sizeof(float));
            else
                for (int64_t c = 0; c < 4; c++)
                    place[c] = tile.first + c < s->channels ? at[c] : 0;
        }
        const int64_t after = plan->in_columns - to;
        memset(out + to * tile.size, 0, (size_t)(after * tile.size) * sizeof(float));
    }
}

/* Copies one row of the output gradient, tile by tile. */
static void copy_gradient(const Plan *plan, const Layer *s, const float *row, int64_t place)
{
    for (int64_t k = 0; k < s->filters; k += FILTERS) {
        float *out = plan->g + k * plan->places + place * FILTERS;
        for (int64_t q = 0; q < s->columns; q++)
            memcpy(out + q * FILTERS, row + q * s->filters + k, FILTERS * sizeof(float));
    }
}

/* A unit over a block: `at` advances by a step per position and by `row` per row. */
#define ADD(COUNT)                                                                                 \
    FAST static void add_##COUNT(float *sum, const float *x, const float *g, int64_t images,       \
                                 int64_t rows, int64_t columns, int64_t image, int64_t row,        \
                                 int64_t step)                                                     \
    {                                                                                              \
        Lanes low[COUNT], high[COUNT];                                                             \
        for (int c = 0; c < COUNT; c++) {                                                          \
            low[c] = *(const Lanes *)(sum + FILTERS * c);                                          \
            high[c] = *(const Lanes *)(sum + FILTERS * c + 8);                                     \
        }                                                                                          \
        for (int64_t n = 0; n < images; n++)                                                       \
            for (int64_t p = 0; p < rows; p++) {                                                   \
                const float *at = x + n * image + p * row;                                         \
                for (int64_t q = 0; q < columns; q++, at += step, g += FILTERS) {                  \
                    const Lanes g_low = *(const Lanes *)g, g_high = *(const Lanes *)(g + 8);       \
                    _Pragma("GCC unroll 6") for (int c = 0; c < COUNT; c++)                        \
                    {                                                                              \
                        const float v = at[c];                                                     \
                        const Lanes same = {v, v, v, v, v, v, v, v};                               \
                        low[c] += same * g_low;                                                    \
                        high[c] += same * g_high;                                                  \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        for (int c = 0; c < COUNT; c++) {                                                          \
            *(Lanes *)(sum + FILTERS * c) = low[c];                                                \
            *(Lanes *)(sum + FILTERS * c + 8) = high[c];                                           \
        }                                                                                          \
    }
ADD(4)
ADD(6)

static void sum_unit(const Plan *plan, const Layer *s, int64_t unit, int64_t images, int64_t rows)
{
    const int64_t taps = s->kernel_height * s->kernel_width, tap = unit % taps;
    const Tile tile = plan->tiles[unit / taps % plan->count];
    const int64_t k = unit / taps / plan->count * FILTERS;
    const int64_t shift = tap / s->kernel_width * plan->in_columns + tap % s->kernel_width;
    const float *x = plan->x + tile.first * plan->spots + shift * tile.size;
    const int64_t step = s->stride * tile.size, row = plan->in_columns * step;
    const int64_t image = plan->in_rows * plan->in_columns * tile.size;
    (tile.size == 6 ? add_6 : add_4)(plan->sums + unit * UNIT, x, plan->g + k * plan->places, images,
                                     rows, s->columns, image, row, step);
}

/* Writes a unit's sums to dW. */
static void write_unit(const Plan *plan, const Layer *s, int64_t unit, float *out)
{
    const int64_t taps = s->kernel_height * s->kernel_width, tap = unit % taps;
    const Tile tile = plan->tiles[unit / taps % plan->count];
    const int64_t k = unit / taps / plan->count * FILTERS;
    const float *sum = plan->sums + unit * UNIT;
    for (int64_t f = 0; f < FILTERS; f++)
        for (int64_t c = 0; c < least(tile.size, s->channels - tile.first); c++)
            out[((k + f) * taps + tap) * s->channels + tile.first + c] = sum[c * FILTERS + f];
}

/* `filters` must be a multiple of 16. Returns 0 if memory runs out. */
int dat_weight_gradient(const float *x, const float *g, float *out, const Layer *s, int32_t threads)
{
    Plan plan = {0};
    if (!make(&plan, s))
        return 0;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t from = plan.units * me / team, to = plan.units * (me + 1) / team;
        memset(plan.sums + from * UNIT, 0, (size_t)((to - from) * UNIT) * sizeof(float));
        for (int64_t n0 = 0; n0 < s->images; n0 += plan.images)
            for (int64_t p0 = 0; p0 < s->rows; p0 += plan.rows) {
                const int64_t images = least(plan.images, s->images - n0);
                const int64_t rows = least(plan.rows, s->rows - p0);
                const int64_t in_rows = (rows - 1) * s->stride + s->kernel_height;
#pragma omp for schedule(static) nowait
                for (int64_t i = 0; i < images * in_rows; i++) {
                    const int64_t n = i / in_rows, p = i % in_rows;
                    const int64_t spot = (n * plan.in_rows + p) * plan.in_columns;
                    copy_row(&plan, s, x, n0 + n, p0 * s->stride + p - s->padding, spot);
                }
#pragma omp for schedule(static)
                for (int64_t i = 0; i < images * rows; i++) {
                    const int64_t row = (n0 + i / rows) * s->rows + p0 + i % rows;
                    copy_gradient(&plan, s, g + row * s->columns * s->filters, i * s->columns);
                }
                for (int64_t unit = from; unit < to; unit++)
                    sum_unit(&plan, s, unit, images, rows);
#pragma omp barrier
            }
        for (int64_t unit = from; unit < to; unit++)
            write_unit(&plan, s, unit, out);
    }
    return 1;
}
