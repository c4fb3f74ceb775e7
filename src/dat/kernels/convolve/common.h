/* Shared by the kernels: vectors of eight floats, a matrix product, and scratch memory that each
   thread keeps from call to call, as large as its largest call needed. The scratch memory is mapped
   from the system: on the heap, it would keep the freed tensors below it from being returned. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __x86_64__
#define FAST __attribute__((target("avx2,fma"), optimize("fp-contract=fast")))
#else
#define FAST
#endif

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));

#define at(p) (*(const Lanes *)(p))
#define put(p, value) (*(Lanes *)(p) = (value))
#define UNROLL _Pragma("GCC unroll 16")
#define GROUP 6 /* rows multiplied at a time */
#define OUTS 16 /* columns multiplied at a time */

/* A convolution; the same as in kernel.py. */
typedef struct {
    int64_t images, height, width, channels; /* of the input */
    int64_t rows, columns, filters;          /* of the output */
    int64_t kernel_height, kernel_width, stride, padding;
} Layer;

typedef struct {
    float *values;
    int64_t size;
} Room;

static inline float *room(Room *kept, int64_t size)
{
    if (size > kept->size) {
        if (kept->values)
            munmap(kept->values, (size_t)kept->size * sizeof(float));
        const int kind = MAP_PRIVATE | MAP_ANONYMOUS, access = PROT_READ | PROT_WRITE;
        void *got = mmap(NULL, (size_t)size * sizeof(float), access, kind, -1, 0);
        kept->values = got == MAP_FAILED ? NULL : got;
        kept->size = kept->values ? size : 0;
    }
    return kept->values;
}

/* Sixteen columns of m [rows][outs] = v [rows][ins] * u [ins][16]; rows is a multiple of six. */
FAST static inline void multiply(const float *v, const float *u, float *m, int64_t rows, int64_t ins,
                                 int64_t outs)
{
    for (int64_t t = 0; t < rows; t += GROUP) {
        const float *from = v + t * ins;
        Lanes low[GROUP] = {0}, high[GROUP] = {0};
        for (int64_t c = 0; c < ins; c++) {
            const Lanes u_low = at(u + c * OUTS), u_high = at(u + c * OUTS + 8);
            UNROLL for (int i = 0; i < GROUP; i++)
            {
                const float s = from[i * ins + c];
                const Lanes same = {s, s, s, s, s, s, s, s};
                low[i] += same * u_low;
                high[i] += same * u_high;
            }
        }
        UNROLL for (int i = 0; i < GROUP; i++)
        {
            put(m + (t + i) * outs, low[i]);
            put(m + (t + i) * outs + 8, high[i]);
        }
    }
}
