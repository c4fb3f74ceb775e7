/* Layer-wise updates for CPUs: all layers of a group in one call, in two passes over memory.

   The first pass moves the moments and sums the squares of theta and of u (for classic LARS, of g);
   the second works u out anew from the moments, which is cheaper than to keep it, and moves theta by
   the layer's ratio. Layers go through both passes in waves that fit into a cache, and the second
   pass walks a wave backwards: it begins with what was used last.

   A layer is cut into blocks of a fixed size, each block is summed in double precision by itself,
   and the sums are added in order: the number of threads does not matter, to the bit.

   lalr.py and lars.py do the same in torch. Every value goes through the same operations in the same
   order there, so that NaN, infinity and zero end up alike; only the norms are rounded otherwise. */

#include <math.h>
#include <omp.h>
#include <stdint.h>

#define TILE 512 /* values whose u waits in the first-level cache to be summed */
#define BLOCK 4096
#ifndef WAVE
#define WAVE (1 << 18) /* values of the layers that go through both passes together */
#endif
#define SMALL 32768 /* values; up to here one thread does it alone */

#define CORE static inline __attribute__((always_inline))

enum { ADAM = 0, MOMENTUM = 1, CLASSIC = 2 };

/* The same as in kernel.py. */
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
    double first;    /* what the gradient adds to the first moment: 1 - beta1 */
    double keep;     /* what stays of the second moment, or of classic LARS's momentum */
    double second;   /* what the squared gradient adds to the second moment: 1 - beta2 */
    int32_t kind, adapt;
} Rule;

/* A layer in hand: where its block begins, and the numbers as floats. */
typedef struct {
    float *restrict theta;
    const float *restrict grad;
    float *restrict m;
    float *restrict v;
    float lr, decay, first, keep, second, scale, floor, ratio;
} Block;

typedef struct {
    double theta, u; /* sums of squares */
} Sums;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

CORE double sum_of_squares(const float *x, int n) {
    double lanes[8] = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i + j < n; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

CORE float lerp(float from, float to, float weight) {
    return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.0f - weight);
}

CORE float adam_u(const Block *b, int i, int decayed) {
    float u = b->m[i] / (sqrtf(b->v[i]) * b->scale + b->floor);
    return decayed ? u + b->decay * b->theta[i] : u;
}

CORE void adam_moments(const Block *b, int n, int decayed, float *u) {
    for (int i = 0; i < n; i++) {
        float g = b->grad[i];
        b->m[i] = lerp(b->m[i], g, b->first);
        b->v[i] = b->v[i] * b->keep + (b->second * g) * g;
        u[i] = adam_u(b, i, decayed);
    }
}

CORE void adam_theta(const Block *b, int n, int decayed) {
    for (int i = 0; i < n; i++) b->theta[i] += (-b->lr * adam_u(b, i, decayed)) * b->ratio;
}

CORE void momentum_moments(const Block *b, int n, int decayed) {
    for (int i = 0; i < n; i++) {
        float m = lerp(b->m[i], b->grad[i], b->first);
        b->m[i] = decayed ? m + b->decay * b->theta[i] : m;
    }
}

CORE void momentum_theta(const Block *b, int n) {
    for (int i = 0; i < n; i++) b->theta[i] += (-b->lr * b->m[i]) * b->ratio;
}

CORE void classic_theta(const Block *b, int n) {
    for (int i = 0; i < n; i++) {
        float u = b->grad[i] + b->decay * b->theta[i];
        b->m[i] = b->m[i] * b->keep + (b->lr * u) * b->ratio;
        b->theta[i] -= b->m[i];
    }
}

/* The first pass over a tile: its moments, then its sums. */
CORE Sums measure_core(Block b, int n, int kind) {
    float u[TILE];
    const float *summed = u;
    if (kind == ADAM) {
        if (b.decay != 0.0f)
            adam_moments(&b, n, 1, u);
        else
            adam_moments(&b, n, 0, u);
    } else if (kind == MOMENTUM) {
        if (b.decay != 0.0f)
            momentum_moments(&b, n, 1);
        else
            momentum_moments(&b, n, 0);
        summed = b.m;
    } else {
        summed = b.grad;
    }
    return (Sums){sum_of_squares(b.theta, n), sum_of_squares(summed, n)};
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

/* Counted up with every change of what Python hands over; dat/optim/kernel.py has the same. */
int32_t dat_version(void) { return 1; }

/* 1: leave AVX2 alone, for tests. */
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

static void advance(Block *b, int n, int kind) {
    b->theta += n, b->grad += n, b->m += n;
    if (kind == ADAM) b->v += n;
}

/* The squares are summed in double precision, but their sum is a float as torch's is: what vanishes
   or overflows there does so here, and a direction that fades away has ratio 1 before tau / length
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
    Sums total = {0, 0};
    const int64_t end = smaller(start + BLOCK, job->layers[layer].size);
    Block b = block_at(job, layer, start);
    for (int64_t i = start; i < end; i += TILE) {
        const int n = (int)smaller(end - i, TILE);
        const Sums part = job->machine->measure(b, n, job->rule->kind);
        total.theta += part.theta, total.u += part.u;
        advance(&b, n, job->rule->kind);
    }
    return total;
}

static void apply(const Job *job, int64_t layer, int64_t start, float ratio) {
    const int64_t end = smaller(start + BLOCK, job->layers[layer].size);
    Block b = block_at(job, layer, start);
    b.ratio = ratio;
    job->machine->apply(b, (int)(end - start), job->rule->kind);
}

/* Blocks `from` to `to` of the layers from `layer` on, whose first block is `block`. */
static void first_pass(const Job *job, int64_t layer, int64_t block, int64_t from, int64_t to) {
    for (; block < to; block += blocks_of(job->layers + layer++)) {
        const int64_t end = smaller(block + blocks_of(job->layers + layer), to);
        for (int64_t i = block > from ? block : from; i < end; i++) {
            job->sums[i] = measure(job, layer, (i - block) * BLOCK);
            if (!job->rule->adapt) apply(job, layer, (i - block) * BLOCK, 1.0f);
        }
    }
}

/* The same blocks backwards; here `layer` and `block` are those behind the last. */
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

/* What one of the threads does. */
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

/* `sums` has room for two numbers a block, `ratios` for one a layer; `adapt` off: for none. */
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
