// What Python calls: chooses the variant of a kernel, and says which ones this machine can run.
#include <cstring>

#include "kvq.h"

#if defined(__x86_64__)
#define KVQ_VARIANTS(X) X(v2) X(v3) X(v4) X(v4_vnni)
#else
#define KVQ_VARIANTS(X) X(generic)
#endif

#define DECLARE(name)                     \
  void kvq_attend_##name(const KvqAttend&); \
  void kvq_seal_##name(const KvqPages&);    \
  void kvq_restore_##name(const KvqPages&);
KVQ_VARIANTS(DECLARE)

struct Variant {
  void (*attend)(const KvqAttend&);
  void (*seal)(const KvqPages&);
  void (*restore)(const KvqPages&);
};

#define ADDRESSES(name) {kvq_attend_##name, kvq_seal_##name, kvq_restore_##name},
static const Variant kVariants[] = {KVQ_VARIANTS(ADDRESSES)};

#define NAME(name) #name ","
// The names of the variants, in the order of their numbers, each followed by a comma.
KVQ_EXPORT const char* kvq_variants() { return KVQ_VARIANTS(NAME); }

// The number of the best variant that this machine can run; -1 if there is none.
KVQ_EXPORT int kvq_best_variant() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 1;
  return __builtin_cpu_supports("sse4.2") ? 0 : -1;
#else
  return 0;
#endif
}

// The version, and the sizes that Python's view of the structs must have.
KVQ_EXPORT int kvq_abi(int what) {
  const int found[] = {KVQ_ABI, sizeof(KvqAttend), sizeof(KvqPart), sizeof(KvqSegment), sizeof(KvqPages)};
  return found[what];
}

static void append(const KvqAttend& a, const void* from, const int64_t* step, const void* to, const int64_t* to_step, int dim) {
  const int64_t item = a.dtype == KVQ_F32 ? 4 : 2;
  for (int64_t b = 0; b < a.batch; b++)
    for (int64_t h = 0; h < a.heads; h++)
      for (int64_t t = 0; t < a.chunk.tokens; t++)
        memcpy((char*)to + item * (b * to_step[0] + h * to_step[1] + (a.tail_tokens + t) * to_step[2]),
               (const char*)from + item * (b * step[0] + h * step[1] + t * step[2]), size_t(item * dim));
}

// Copies the chunk behind the tail. Of a call it reads batch, heads, dtype, chunk, tail, tail_tokens and the parts' dim.
KVQ_EXPORT void kvq_append(const KvqAttend* a) {
  append(*a, a->chunk.key, a->chunk.key_stride, a->tail.key, a->tail.key_stride, a->key.dim);
  append(*a, a->chunk.value, a->chunk.value_stride, a->tail.value, a->tail.value_stride, a->value.dim);
}

KVQ_EXPORT void kvq_attend(const KvqAttend* a, int variant) { kVariants[variant].attend(*a); }
KVQ_EXPORT void kvq_seal(const KvqPages* p, int variant) { kVariants[variant].seal(*p); }
KVQ_EXPORT void kvq_restore(const KvqPages* p, int variant) { kVariants[variant].restore(*p); }
