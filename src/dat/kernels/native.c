/* Small loops over a batch, for which torch needs many passes: random words, crops with flips, and
   an attack's step. Each has a Python equivalent with the same bits, in core/rng.py, data/augment.py
   and core/threat.py. */

#include <stdint.h>
#include <string.h>

int dat_version(void) { return 2; }

/* Philox4x32-10 (Salmon et al. 2011) with counters (block, 0, low, high), where low and high are the
   halves of the sample index: four 32-bit words per block, each in 64 bits. */
void dat_philox(const uint64_t *index, int64_t samples, int64_t blocks, uint64_t key, uint64_t *out)
{
    for (int64_t n = 0; n < samples; n++) {
        for (int64_t block = 0; block < blocks; block++, out += 4) {
            uint32_t c0 = (uint32_t)block, c1 = 0;
            uint32_t c2 = (uint32_t)index[n], c3 = (uint32_t)(index[n] >> 32);
            uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
            for (int round = 0; round < 10; round++) {
                const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
                c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
                c1 = (uint32_t)p1;
                c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
                c3 = (uint32_t)p0;
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
        }
    }
}

/* The bytes of `from` in reverse order, eight at a time. */
static void mirror(uint8_t *to, const uint8_t *from, int64_t count)
{
    for (; count >= 8; count -= 8, from += 8) {
        uint64_t eight;
        memcpy(&eight, from, 8);
        eight = __builtin_bswap64(eight);
        memcpy(to + count - 8, &eight, 8);
    }
    for (; count > 0; count--)
        to[count - 1] = *from++;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Crops a window of the image's size from the zero-padded image, `down` and `right` of its corner, and
   mirrors it where `flip` is set. */
void dat_crop(const uint8_t *x, uint8_t *out, int64_t images, int64_t channels, int64_t height,
              int64_t width, int64_t padding, const int64_t *down, const int64_t *right,
              const uint8_t *flip)
{
    const int64_t plane = height * width;
    for (int64_t n = 0; n < images; n++) {
        const int64_t below = down[n] - padding, beside = right[n] - padding;
        const int64_t top = larger(0, -below), left = larger(0, -beside);
        const int64_t rows = height - larger(below, -below);      /* that lie inside the image */
        const int64_t columns = width - larger(beside, -beside);
        if (rows < height || columns < width)
            memset(out + n * channels * plane, 0, (size_t)(channels * plane));
        if (rows <= 0 || columns <= 0)
            continue;
        for (int64_t c = n * channels; c < (n + 1) * channels; c++) {
            const uint8_t *from = x + c * plane + (top + below) * width + left + beside;
            uint8_t *to = out + c * plane + top * width;
            to += flip[n] ? width - left - columns : left;
            for (int64_t row = 0; row < rows; row++, from += width, to += width) {
                if (flip[n])
                    mirror(to, from, columns);
                else
                    memcpy(to, from, (size_t)columns);
            }
        }
    }
}

/* A step along the sign of the gradient, projected onto the l-infinity ball of radius eps around x and
   onto [0, 1]. NaN stays NaN. */
void dat_ascend(const float *restrict x_adv, const float *restrict gradient,
                const float *restrict x, float *restrict out, int64_t count, float step, float eps)
{
    for (int64_t i = 0; i < count; i++) {
        const float sign = (float)((gradient[i] > 0) - (gradient[i] < 0));
        const float low = x[i] - eps, high = x[i] + eps;
        float to = x_adv[i] + step * sign;
        to = to < low ? low : to;
        to = to > high ? high : to;
        to = to < 0 ? 0 : to;
        out[i] = to > 1 ? 1 : to;
    }
}
