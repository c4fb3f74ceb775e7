/* The fused quantizer for CPUs: encoding computes norms, rounds at random and packs; decoding
   unpacks, scales and accumulates.

   A value is sent as an integer code of `bits` bits in two's complement, packed without gaps, the
   first one in the lowest bits of the first byte. The values of a group share a step size, and
   value i is codes[i] * step. A group that contains NaN or infinity has an infinite step, and its
   codes mark the values that are not finite: those are decoded as NaN, the others as 0.

   reference.py implements the same in torch and must give the same bits: it performs every
   floating-point operation in the same order, and the build disables contraction.

   The loops are plain C that compilers vectorize. Each is compiled twice, for any machine and for
   AVX2, and dispatched at run time. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 512 /* values processed at a time: they stay in the L1 cache */
#define SMALL_GROUP 8192 /* values up to which a single thread processes a group */
#define WEYL 0x9e3779b9u

enum { MAX_NORM = 0, L2_NORM = 1, GIVEN = 2 };
enum { SET = 0, ADD = 1, SUBTRACT = 2 };

#define CORE static inline __attribute__((always_inline))

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* 32 random bits: a Weyl sequence over the positions, mixed with the halves of the key by two
   rounds of multiply and shift. The upper bits have the better quality. */
CORE uint32_t mix(uint32_t weyl, uint32_t high) {
    uint32_t x = weyl ^ weyl >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x += high;
    x *= 0x846ca68bu;
    return x;
}

CORE uint32_t magnitude_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

CORE double largest(const float *x, int n) {
    int32_t most = 0; /* without their sign, the bits of floats sort like the floats, NaN last */
    for (int i = 0; i < n; i++) {
        int32_t bits = (int32_t)magnitude_bits(x[i]);
        most = bits > most ? bits : most;
    }
    float value;
    memcpy(&value, &most, 4);
    return most >= 0x7f800000 ? INFINITY : value;
}

CORE double sum_of_squares(const float *x, int n) {
    double lanes[8] = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i + j < n; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

/* The step size that puts `measure` on the highest level, rounded up: no value exceeds it. */
static float step_of(double measure, int levels) {
    if (!(measure <= DBL_MAX)) return INFINITY;
    double exact = measure / levels;
    if (exact >= FLT_MAX) return FLT_MAX;
    float step = (float)exact;
    uint32_t bits;
    memcpy(&bits, &step, 4);
    bits += (double)step < exact; /* the next larger float */
    memcpy(&step, &bits, 4);
    return step;
}

/* Up to 8 bits. Added to 1.5 * 2^bits, a value in units of the step leaves 23 - bits bits of the
   mantissa for its fraction. The random bits form a fraction below 1, so that their sum carries
   into the integer part with a probability equal to the value's fraction. Because steps are rounded
   up, a value exceeds the highest level by at most a rounding error in its last place, which is too
   small to matter in this sum. The bits above the code are garbage. */
CORE void quantize8(const float *x, int n, float inverse, int bits, int random, uint32_t weyl,
                    uint32_t high, uint8_t *codes) {
    const float base = 1.5f * (float)(1 << bits);
    const int fraction_bits = 23 - bits;
    const uint8_t sign = (uint8_t)(1 << (bits - 1));
    uint32_t zero;
    memcpy(&zero, &base, 4);
    for (int i = 0; i < n; i++, weyl += WEYL) {
        uint32_t drawn =
            random ? mix(weyl, high) >> (32 - fraction_bits) : 1u << (fraction_bits - 1);
        uint32_t dither = zero | drawn;
        float sum;
        memcpy(&sum, &dither, 4);
        sum += x[i] * inverse;
        uint32_t bits_of_sum;
        memcpy(&bits_of_sum, &sum, 4);
        codes[i] = (uint8_t)(bits_of_sum >> fraction_bits) ^ sign;
    }
}

/* 16 bits leave too few bits for that: computes integer part and fraction separately. */
CORE void quantize16(const float *x, int n, float inverse, int levels, int random, uint32_t weyl,
                     uint32_t high, int16_t *codes) {
    const float top = (float)levels;
    for (int i = 0; i < n; i++, weyl += WEYL) {
        uint32_t drawn = random ? mix(weyl, high) >> 8 : 1u << 23;
        float v = x[i] * inverse;
        v = v > top ? top : v;
        v = v < -top ? -top : v;
        int32_t level = (int32_t)v;
        level -= (float)level > v;
        level += (float)(int32_t)drawn * 0x1p-24f < v - (float)level;
        codes[i] = (int16_t)level;
    }
}

/* Eight codes in eight bytes, merged pair by pair until they fill `bits` bytes. */
CORE void pack(const uint8_t *codes, int n, int bits, uint8_t *out) {
    const uint64_t keep = 0x0101010101010101u * ((1u << bits) - 1);
    const int words = (n + 7) / 8, bytes = (n * bits + 7) / 8;
    uint64_t packed[TILE / 8];
    memcpy(packed, codes, 8 * (size_t)words);
    for (int i = 0; i < words; i++) {
        uint64_t w = packed[i] & keep;
        w = (w & 0x00ff00ff00ff00ffu) | ((w & 0xff00ff00ff00ff00u) >> (8 - bits));
        w = (w & 0x0000ffff0000ffffu) | ((w & 0xffff0000ffff0000u) >> (16 - 2 * bits));
        packed[i] = (w & 0x00000000ffffffffu) | ((w >> 32) << (4 * bits));
    }
    int i = 0;
    for (; bits * i + 8 <= bytes; i++) memcpy(out + bits * i, packed + i, 8); /* overlapping */
    for (; i < words; i++)
        memcpy(out + bits * i, packed + i, (size_t)smaller(bytes - bits * i, bits));
}

CORE void unpack(const uint8_t *in, int n, int bits, int8_t *codes) {
    const uint64_t sign = 0x0101010101010101u << (bits - 1);
    const uint64_t low1 = 0x0001000100010001u * ((1u << bits) - 1);
    const uint64_t low2 = 0x0000000100000001u * ((1ull << 2 * bits) - 1);
    const uint64_t low4 = (1ull << 4 * bits) - 1;
    const int words = (n + 7) / 8, bytes = (n * bits + 7) / 8;
    uint64_t packed[TILE / 8] = {0};
    int i = 0;
    for (; bits * i + 8 <= bytes; i++) memcpy(packed + i, in + bits * i, 8);
    for (; i < words; i++)
        memcpy(packed + i, in + bits * i, (size_t)smaller(bytes - bits * i, bits));
    for (i = 0; i < words; i++) {
        uint64_t w = packed[i];
        w = (w & low4) | ((w >> (4 * bits) & low4) << 32);
        w = (w & low2) | ((w & low2 << 2 * bits) << (16 - 2 * bits));
        w = (w & low1) | ((w & low1 << bits) << (8 - bits));
        uint64_t negative = w & sign;
        packed[i] = w | ((negative << (9 - bits)) - (negative << 1));
    }
    memcpy(codes, packed, 8 * (size_t)words);
}

#define SCALE                                                                                      \
    if (!(step <= FLT_MAX)) {                                                                      \
        for (int i = 0; i < n; i++) {                                                              \
            float value = codes[i] ? NAN : 0.0f;                                                   \
            out[i] = mode == SET ? value : mode == ADD ? out[i] + value : out[i] - value;          \
        }                                                                                          \
    } else if (mode == SET) {                                                                      \
        for (int i = 0; i < n; i++) out[i] = (float)codes[i] * step;                               \
    } else if (mode == ADD) {                                                                      \
        for (int i = 0; i < n; i++) out[i] += (float)codes[i] * step;                              \
    } else {                                                                                       \
        for (int i = 0; i < n; i++) out[i] -= (float)codes[i] * step;                              \
    }

/* Encodes and decodes one tile. A tile starts at a multiple of 8 values of its message, hence at a
   byte boundary. */
CORE void encode_core(const float *x, int n, float step, int bits, int levels, int random,
                      uint64_t key, uint32_t position, uint8_t *out) {
    int16_t wide[TILE];
    uint8_t narrow[TILE + 8];
    float scaled[TILE];
    uint8_t *codes = bits == 8 ? out : narrow;
    uint32_t weyl = (uint32_t)key + position * WEYL, high = (uint32_t)(key >> 32);
    if (step < 0x1p-100f || step > 0x1p+126f) {
        /* its inverse could overflow or lose digits; this scaling does not change the quotient */
        const float scale = step < 1 ? 0x1p+100f : 0.25f;
        for (int i = 0; i < n; i++) scaled[i] = x[i] * scale;
        x = scaled, step *= scale;
    }
    /* prefetch the next tile while this one is computed; this reads nothing beyond the end */
    for (int i = 0; i < TILE; i += 16) __builtin_prefetch(x + TILE + i);
    float inverse = step > 0 ? 1.0f / step : 0.0f;
    if (!(step <= FLT_MAX))
        for (int i = 0; i < n; i++) {
            int broken = magnitude_bits(x[i]) >= 0x7f800000u;
            if (bits == 16)
                wide[i] = (int16_t)broken;
            else
                codes[i] = (uint8_t)broken;
        }
    else if (bits == 16)
        quantize16(x, n, inverse, levels, random, weyl, high, wide);
    else if (random)
        quantize8(x, n, inverse, bits, 1, weyl, high, codes);
    else
        quantize8(x, n, inverse, bits, 0, weyl, high, codes);
    if (bits == 16)
        memcpy(out, wide, 2 * (size_t)n);
    else if (bits < 8) {
        memset(codes + n, 0, 8); /* the last word may be incomplete */
        pack(codes, n, bits, out);
    }
}

CORE void decode_core(const uint8_t *in, int n, float step, int bits, int mode, float *out) {
    if (bits == 16) {
        int16_t codes[TILE];
        memcpy(codes, in, 2 * (size_t)n);
        SCALE
    } else if (bits == 8) {
        const int8_t *codes = (const int8_t *)in;
        SCALE
    } else {
        int8_t codes[TILE + 8];
        unpack(in, n, bits, codes);
        SCALE
    }
}

CORE double measure_core(const float *x, int n, int norm) {
    return norm == L2_NORM ? sum_of_squares(x, n) : largest(x, n);
}

typedef struct {
    void (*encode)(const float *, int, float, int, int, int, uint64_t, uint32_t, uint8_t *);
    void (*decode)(const uint8_t *, int, float, int, int, float *);
    double (*measure)(const float *, int, int);
} Machine;

#define COMPILE(NAME, TARGET)                                                                      \
    TARGET static void encode_##NAME(const float *x, int n, float step, int bits, int levels,      \
                                     int random, uint64_t key, uint32_t position, uint8_t *out) {  \
        encode_core(x, n, step, bits, levels, random, key, position, out);                         \
    }                                                                                              \
    TARGET static void decode_##NAME(const uint8_t *in, int n, float step, int bits, int mode,     \
                                     float *out) {                                                 \
        decode_core(in, n, step, bits, mode, out);                                                 \
    }                                                                                              \
    TARGET static double measure_##NAME(const float *x, int n, int norm) {                         \
        return measure_core(x, n, norm);                                                           \
    }                                                                                              \
    static const Machine NAME = {encode_##NAME, decode_##NAME, measure_##NAME};

COMPILE(any, )
#if defined(__x86_64__)
COMPILE(avx2, __attribute__((target("avx2"))))
#endif

static int plain = 0;

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "messages are little-endian, and packed as such"
#endif

/* Version of the C interface, increased with every change; must equal VERSION in codec.py. */
int32_t dat_version(void) { return 2; }

/* 1 disables AVX2, for tests. */
void dat_plain(int32_t on) { plain = on; }

int32_t dat_has_avx2(void) {
#if defined(__x86_64__)
    return !plain && __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

static const Machine *machine(void) {
#if defined(__x86_64__)
    if (dat_has_avx2()) return &avx2;
#endif
    return &any;
}

/* A run of consecutive values and its place in a message; layout.py has the same struct. */
typedef struct {
    int64_t start;    /* index of its first value in the bucket */
    int64_t length;   /* values */
    int64_t group;    /* values that share a step size; 0 if they are sent as float32 */
    int64_t floats;   /* byte offset of its step sizes or, with group 0, of its values */
    int64_t codes;    /* byte offset of its codes */
    int64_t position; /* index of its first value in the whole gradient, seeds the rounding */
} Run;

/* The work on one run. Its units are its groups or, if these are large, tiles. */
typedef struct {
    const Machine *machine;
    int bits, levels, norm, random, mode, threads;
    uint64_t key;
    Run run;
    int64_t unit, units_per_group;
    float *values; /* of the run */
    uint8_t *steps, *codes;
    double *parts; /* partial norms of the tiles of a large group */
    int64_t messages, stride; /* number of messages to decode, and bytes between their starts */
} Job;

static Job begin(Job job, const float *x, const Run *run, const uint8_t *message) {
    job.machine = machine();
    job.run = *run;
    job.unit = run->group > SMALL_GROUP ? TILE : run->group;
    job.units_per_group = run->group ? (run->group + job.unit - 1) / job.unit : 0;
    job.values = (float *)x + run->start;
    job.steps = (uint8_t *)message + run->floats;
    job.codes = (uint8_t *)message + run->codes;
    if (run->length < SMALL_GROUP) job.threads = 1;
    return job;
}

/* The only place that starts threads. A short job starts none, because resizing the thread team is
   expensive. */
static void each(int64_t count, const Job *job, void (*work)(const Job *, int64_t)) {
    if (job->threads < 2) {
        for (int64_t i = 0; i < count; i++) work(job, i);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(job->threads)
    for (int64_t i = 0; i < count; i++) work(job, i);
}

static int64_t groups_of(const Job *job) {
    return (job->run.length + job->run.group - 1) / job->run.group;
}

static float step_at(const uint8_t *steps, int64_t group) {
    float step;
    memcpy(&step, steps + 4 * group, 4);
    return step;
}

static void put_step(const Job *job, int64_t group, double measure) {
    float step = step_of(job->norm == L2_NORM ? sqrt(measure) : measure, job->levels);
    memcpy(job->steps + 4 * group, &step, 4);
}

static double join(double total, double part, int norm) {
    if (norm == L2_NORM) return total + part;
    return part > total ? part : total;
}

static double measure_tile(const Job *job, int64_t start, int64_t end) {
    int n = (int)smaller(end - start, TILE);
    return job->machine->measure(job->values + start, n, job->norm);
}

static void measure_group(const Job *job, int64_t group) {
    int64_t start = group * job->run.group;
    int64_t end = smaller(start + job->run.group, job->run.length);
    double total = 0;
    for (int64_t i = start; i < end; i += TILE)
        total = join(total, measure_tile(job, i, end), job->norm);
    put_step(job, group, total);
}

static void measure_part(const Job *job, int64_t tile) {
    job->parts[tile] = measure_tile(job, tile * TILE, job->run.length);
}

/* If a run is a single group, threads share its tiles; their partial norms are combined in order,
   so that the result does not depend on the number of threads. */
static void measure_run(Job job) {
    int64_t tiles = (job.run.length + TILE - 1) / TILE;
    int shared = job.threads > 1 && groups_of(&job) == 1;
    job.parts = shared ? malloc(sizeof(double) * (size_t)tiles) : NULL;
    if (!job.parts) {
        each(groups_of(&job), &job, measure_group);
        return;
    }
    each(tiles, &job, measure_part);
    double total = 0;
    for (int64_t i = 0; i < tiles; i++) total = join(total, job.parts[i], job.norm);
    put_step(&job, 0, total);
    free(job.parts);
}

static void unit_bounds(const Job *job, int64_t unit, int64_t *group, int64_t *start,
                        int64_t *end) {
    int64_t in_group = 0;
    *group = unit;
    if (job->units_per_group > 1) {
        *group = unit / job->units_per_group;
        in_group = unit % job->units_per_group;
    }
    *start = *group * job->run.group + in_group * job->unit;
    *end = smaller(*start + job->unit, smaller((*group + 1) * job->run.group, job->run.length));
}

static void encode_unit(const Job *job, int64_t unit) {
    int64_t group, start, end;
    unit_bounds(job, unit, &group, &start, &end);
    if (job->norm != GIVEN) measure_group(job, group); /* and the group is in the cache below */
    for (int64_t i = start; i < end; i += TILE)
        job->machine->encode(job->values + i, (int)smaller(end - i, TILE),
                             step_at(job->steps, group), job->bits, job->levels, job->random,
                             job->key, (uint32_t)(job->run.position + i),
                             job->codes + i * job->bits / 8);
}

static void decode_unit(const Job *job, int64_t unit) {
    int64_t group, start, end;
    unit_bounds(job, unit, &group, &start, &end);
    for (int64_t i = start; i < end; i += TILE)
        for (int64_t k = 0; k < job->messages; k++) { /* the tile stays in the cache for all */
            const int64_t from = k * job->stride;
            job->machine->decode(job->codes + from + i * job->bits / 8, (int)smaller(end - i, TILE),
                                 step_at(job->steps + from, group), job->bits,
                                 k ? ADD : job->mode, job->values + i);
        }
}

static void decode_floats(const Job *job) {
    for (int64_t k = 0; k < job->messages; k++)
        for (int64_t i = 0; i < job->run.length; i++) {
            float value = step_at(job->steps + k * job->stride, i), *to = job->values + i;
            int mode = k ? ADD : job->mode;
            *to = mode == SET ? value : mode == ADD ? *to + value : *to - value;
        }
}

/* Writes the step sizes and the float32 values of a message. */
void dat_measure(const float *x, const Run *runs, int64_t count, int32_t levels, int32_t norm,
                 uint8_t *message, int32_t threads) {
    const Job settings = {.levels = levels, .norm = norm, .threads = threads};
    for (const Run *run = runs; run < runs + count; run++) {
        Job job = begin(settings, x, run, message);
        if (run->group)
            measure_run(job);
        else
            memcpy(job.steps, job.values, 4 * (size_t)run->length);
    }
}

/* Writes the message that encodes x. With norm GIVEN, the message already holds its step sizes and
   float32 values. */
void dat_encode(const float *x, const Run *runs, int64_t count, int32_t bits, int32_t levels,
                int32_t norm, int32_t random, uint64_t key, uint8_t *message, int32_t threads) {
    const Job settings = {.bits = bits, .levels = levels, .norm = norm, .random = random,
                          .key = key, .threads = threads};
    for (const Run *run = runs; run < runs + count; run++) {
        Job job = begin(settings, x, run, message);
        if (run->group) {
            if (norm != GIVEN && run->group > SMALL_GROUP) {
                measure_run(job);
                job.norm = GIVEN;
            }
            each(groups_of(&job) * job.units_per_group, &job, encode_unit);
        } else if (norm != GIVEN) {
            memcpy(job.steps, job.values, 4 * (size_t)run->length);
        }
    }
}

/* out = message, out += message or out -= message, for the values of the runs; then adds any
   further messages, in order. */
void dat_decode(const uint8_t *message, int64_t messages, int64_t stride, const Run *runs,
                int64_t count, int32_t bits, int32_t mode, float *out, int32_t threads) {
    const Job settings = {.bits = bits, .mode = mode, .threads = threads, .messages = messages,
                          .stride = stride};
    for (const Run *run = runs; run < runs + count; run++) {
        Job job = begin(settings, out, run, message);
        if (run->group)
            each(groups_of(&job) * job.units_per_group, &job, decode_unit);
        else
            decode_floats(&job);
    }
}
