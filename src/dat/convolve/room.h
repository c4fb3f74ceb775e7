/* What the kernels share: eight numbers at a time, and memory that a thread keeps from call to call,
   as large as its largest call has needed. It comes from the system: in the midst of a network's
   tensors it would keep those below it from being given back. */

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
