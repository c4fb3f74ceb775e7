/* Layer-wise updates for CPUs: all layers of a group in one call, in two passes over memory.

   The first pass updates the moments and sums the squares of theta and of u (for classic LARS, of g);
   the second recomputes u from the moments, so that it is never stored, and updates theta with the
   layer's ratio. Layers go through both passes in waves that fit into a cache, and the second pass
   goes through a wave backwards, starting with the most recently used values.

   A layer is split into blocks of a fixed size, each block is summed separately, and the sums are
   added in order: the result does not depend on the number of threads, down to the bit.

   lalr.py and classic_lars.py do the same in torch. Every value goes through the same operations in
   the same order there, so that NaN, infinity and zero agree; only the norms are rounded
   differently. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define STRIP 32 /* values processed at a time */
#define TILE 256 /* values whose squares are summed as floats */
#define BLOCK 16384
#define WAVE (1 << 18) /* values of the layers that go through both passes together */
#define SMALL 32768 /* values; up to this size one thread is used */

#define CORE static inline __attribute__((always_inline))

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));

enum { ADAM = 0, MOMENTUM = 1, CLASSIC = 2 };

/* The same as in optimizer.py. */
typedef struct {
    float *theta;
    const float *grad;
    float *m; /* the first moment, or the momentum */
    float *v; /* the second moment: Adam's */
    int64_t size;
} Layer;

typedef struct {
    double scale, floor; /* Adam's u is m / (sqrt(v) * scale + floor) + decay * theta */
} Denominator;

typedef struct {
    double lr, decay;
    double c_l, c_u; /* the bounds of tau */
    double trust;    /* classic LARS: its coefficient */
    double first;    /* the weight of the gradient in the first moment: 1 - beta1 */
    double keep;     /* the decay of the second moment, or of classic LARS's momentum */
    double second;   /* the weight of the squared gradient in the second moment: 1 - beta2 */
    int32_t kind, adapt;
} Rule;

/* A block of a layer: its pointers, and the coefficients as floats. */
typedef struct {
    float *theta;
    const float *grad;
    float *m, *v;
    float lr, decay, first, keep, second, scale, floor, ratio;
} Block;

typedef struct {
    double theta, u; /* sums of squares */
} Sums;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

CORE float lerp(float from, float to, float weight) {
    return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.0f - weight);
}

CORE void advance(Block *b, int n, int kind) {
    b->theta += n, b->grad += n, b->m += n;
    if (kind == ADAM) b->v += n;
}

CORE float adam_u(const Block *b, float m, float v, float theta, int decayed) {
    float u = m / (sqrtf(v) * b->scale + b->floor);
    return decayed ? u + b->decay * theta : u;
}

CORE void adam_moments(const Block *b, int n, int decayed, float *restrict u) {
    const float *restrict theta = b->theta, *restrict grad = b->grad;
    float *restrict m = b->m, *restrict v = b->v;
    for (int i = 0; i < n; i++) {
        m[i] = lerp(m[i], grad[i], b->first);
        v[i] = v[i] * b->keep + (b->second * grad[i]) * grad[i];
        u[i] = adam_u(b, m[i], v[i], theta[i], decayed);
    }
}

CORE void adam_theta(const Block *b, int n, int decayed) {
    const float *restrict m = b->m, *restrict v = b->v;
    float *restrict theta = b->theta;
    for (int i = 0; i < n; i++)
        theta[i] += (-b->lr * adam_u(b, m[i], v[i], theta[i], decayed)) * b->ratio;
}

CORE void momentum_moments(const Block *b, int n, int decayed) {
    const float *restrict theta = b->theta, *restrict grad = b->grad;
    float *restrict m = b->m;
    for (int i = 0; i < n; i++) {
        float moved = lerp(m[i], grad[i], b->first);
        m[i] = decayed ? moved + b->decay * theta[i] : moved;
    }
}

CORE void momentum_theta(const Block *b, int n) {
    const float *restrict m = b->m;
    float *restrict theta = b->theta;
    for (int i = 0; i < n; i++) theta[i] += (-b->lr * m[i]) * b->ratio;
}

CORE void classic_theta(const Block *b, int n) {
    const float *restrict grad = b->grad;
    float *restrict m = b->m, *restrict theta = b->theta;
    for (int i = 0; i < n; i++) {
        m[i] = m[i] * b->keep + (b->lr * (grad[i] + b->decay * theta[i])) * b->ratio;
        theta[i] -= m[i];
    }
}

/* One strip of the first pass: updates the moments and sums squares in eight lanes. */
CORE void measure_strip(const Block *b, int n, int kind, int decayed, Lanes *of_theta, Lanes *of_u) {
    float u[STRIP], filled[2][STRIP] = {{0}};
    const float *x = b->theta, *y = kind == ADAM ? u : kind == MOMENTUM ? b->m : b->grad;
    if (kind == ADAM) adam_moments(b, n, decayed, u);
    if (kind == MOMENTUM) momentum_moments(b, n, decayed);
    if (n < STRIP) {
        memcpy(filled[0], x, sizeof(float) * (size_t)n);
        memcpy(filled[1], y, sizeof(float) * (size_t)n);
        x = filled[0], y = filled[1];
    }
    for (int i = 0; i < STRIP; i += 8) {
        const Lanes eight = *(const Lanes *)(x + i), others = *(const Lanes *)(y + i);
        *of_theta += eight * eight;
        *of_u += others * others;
    }
}

/* A lane sums TILE / 8 floats, few enough to be accurate; beyond that, sums are doubles. */
CORE Sums measure_kind(Block b, int n, int kind, int decayed) {
    Sums sums = {0, 0};
    while (n > 0) {
        Lanes of_theta = {0}, of_u = {0};
        const int tile = n < TILE ? n : TILE, rest = tile % STRIP;
        for (int i = 0; i < tile - rest; i += STRIP, advance(&b, STRIP, kind))
            measure_strip(&b, STRIP, kind, decayed, &of_theta, &of_u);
        if (rest) measure_strip(&b, rest, kind, decayed, &of_theta, &of_u);
        advance(&b, rest, kind);
        for (int i = 0; i < 8; i++) sums.theta += of_theta[i], sums.u += of_u[i];
        n -= tile;
    }
    return sums;
}

CORE Sums measure_core(Block b, int n, int kind) {
    const int decayed = b.decay != 0.0f;
    if (kind == ADAM) return decayed ? measure_kind(b, n, ADAM, 1) : measure_kind(b, n, ADAM, 0);
    if (kind == CLASSIC) return measure_kind(b, n, CLASSIC, 0);
    return decayed ? measure_kind(b, n, MOMENTUM, 1) : measure_kind(b, n, MOMENTUM, 0);
}

/* The second pass. */
CORE void apply_core(Block b, int n, int kind) {
    if (kind == ADAM) {
        if (b.decay != 0.0f)
            adam_theta(&b, n, 1);
        else
            adam_theta(&b, n, 0);
    } else if (kind == MOMENTUM) {
        momentum_theta(&b, n);
    } else {
        classic_theta(&b, n);
    }
}

typedef struct {
    Sums (*measure)(Block, int, int);
    void (*apply)(Block, int, int);
} Machine;

#define COMPILE(NAME, TARGET)                                                                      \
    TARGET static Sums measure_##NAME(Block b, int n, int kind) {                                  \
        return measure_core(b, n, kind);                                                           \
    }                                                                                              \
    TARGET static void apply_##NAME(Block b, int n, int kind) { apply_core(b, n, kind); }          \
    static const Machine NAME = {measure_##NAME, apply_##NAME};

COMPILE(any, )
#if defined(__x86_64__)
COMPILE(avx2, __attribute__((target("avx2"))))
#endif

static int plain = 0;

/* Incremented with every change of the interface; optimizer.py has the same. */
int32_t dat_version(void) { return 1; }

/* 1: do not use AVX2, for tests. */
void dat_plain(int32_t on) { plain = on; }

static const Machine *machine(void) {
#if defined(__x86_64__)
    if (!plain && __builtin_cpu_supports("avx2")) return &avx2;
#endif
    return &any;
}

typedef struct {
    const Machine *machine;
    const Rule *rule;
    const Layer *layers;
    const Denominator *denominators;
    int64_t count;
    Sums *sums; /* of all blocks of all layers, in order */
} Job;

static int64_t blocks_of(const Layer *layer) { return (layer->size + BLOCK - 1) / BLOCK; }

static Block block_at(const Job *job, int64_t layer, int64_t start) {
    const Layer *l = job->layers + layer;
    const Rule *rule = job->rule;
    /* momentum has the decay inside the moment */
    const double decay = rule->kind == MOMENTUM ? rule->first * rule->decay : rule->decay;
    Block b = {
        .theta = l->theta + start,
        .grad = l->grad + start,
        .m = l->m + start,
        .lr = (float)rule->lr,
        .decay = (float)decay,
        .first = (float)rule->first,
        .keep = (float)rule->keep,
        .second = (float)rule->second,
        .ratio = 1.0f,
    };
    if (rule->kind == ADAM) {
        b.v = l->v + start;
        b.scale = (float)job->denominators[layer].scale;
        b.floor = (float)job->denominators[layer].floor;
    }
    return b;
}

/* The squares are summed in double precision, but their sum is a float as in torch: it underflows and
   overflows where torch's does, and a vanishing direction has ratio 1 before tau / length
   overflows. */
static float norm(double squares) { return sqrtf((float)squares); }

static float ratio_of(const Rule *rule, const Sums *sums, int64_t blocks) {
    Sums total = {0, 0};
    for (int64_t i = 0; i < blocks; i++) total.theta += sums[i].theta, total.u += sums[i].u;
    const float weight = norm(total.theta), c_l = (float)rule->c_l, c_u = (float)rule->c_u;
    float tau = weight < c_l ? c_l : weight > c_u ? c_u : weight;
    float length = norm(total.u);
    if (rule->kind == CLASSIC) {
        length += (float)rule->decay * weight;
        tau = (float)rule->trust * weight;
        return weight > 0 && length > 0 ? tau / length : 1.0f;
    }
    return tau > 0 && length > 0 ? tau / length : 1.0f;
}

static Sums measure(const Job *job, int64_t layer, int64_t start) {
    const int64_t end = smaller(start + BLOCK, job->layers[layer].size);
    return job->machine->measure(block_at(job, layer, start), (int)(end - start), job->rule->kind);
}

static void apply(const Job *job, int64_t layer, int64_t start, float ratio) {
    const int64_t end = smaller(start + BLOCK, job->layers[layer].size);
    Block b = block_at(job, layer, start);
    b.ratio = ratio;
    job->machine->apply(b, (int)(end - start), job->rule->kind);
}

/* Blocks `from` to `to`, starting at layer `layer`, whose first block is `block`. */
static void first_pass(const Job *job, int64_t layer, int64_t block, int64_t from, int64_t to) {
    for (; block < to; block += blocks_of(job->layers + layer++)) {
        const int64_t end = smaller(block + blocks_of(job->layers + layer), to);
        for (int64_t i = block > from ? block : from; i < end; i++) {
            job->sums[i] = measure(job, layer, (i - block) * BLOCK);
            if (!job->rule->adapt) apply(job, layer, (i - block) * BLOCK, 1.0f);
        }
    }
}

/* The same blocks backwards; here `layer` and `block` are one past the last. */
static void second_pass(const Job *job, int64_t layer, int64_t block, int64_t from, int64_t to) {
    while (block > from) {
        const int64_t blocks = blocks_of(job->layers + --layer), end = smaller(block, to);
        block -= blocks;
        if (block >= to) continue;
        const float ratio = ratio_of(job->rule, job->sums + block, blocks);
        for (int64_t i = end - 1; i >= block && i >= from; i--)
            apply(job, layer, (i - block) * BLOCK, ratio);
    }
}

/* The work of one thread. */
static void work(const Job *job, int64_t thread, int64_t threads) {
    int64_t layer = 0, block = 0;
    while (layer < job->count) {
        int64_t behind = layer, blocks = 0, values = 0;
        do {
            values += job->layers[behind].size;
            blocks += blocks_of(job->layers + behind++);
        } while (behind < job->count && (values + job->layers[behind].size <= WAVE || !job->rule->adapt));
        const int64_t from = block + blocks * thread / threads;
        const int64_t to = block + blocks * (thread + 1) / threads;
        first_pass(job, layer, block, from, to);
        if (job->rule->adapt) {
            if (threads > 1) {
#pragma omp barrier
            }
            second_pass(job, behind, block + blocks, from, to);
        }
        layer = behind, block += blocks;
    }
}

/* `sums` has room for two numbers per block, `ratios` for one per layer (unused without `adapt`). */
void dat_update(const Rule *rule, const Layer *layers, const Denominator *denominators,
                int64_t count, double *sums, float *ratios, int32_t threads) {
    const Job job = {machine(), rule, layers, denominators, count, (Sums *)sums};
    int64_t values = 0;
    for (int64_t i = 0; i < count; i++) values += layers[i].size;
    if (threads < 2 || values < SMALL) {
        work(&job, 0, 1);
    } else {
#pragma omp parallel num_threads(threads)
        work(&job, omp_get_thread_num(), omp_get_num_threads());
    }
    for (int64_t i = 0, block = 0; rule->adapt && i < count; block += blocks_of(layers + i++))
        ratios[i] = ratio_of(rule, job.sums + block, blocks_of(layers + i));
}
