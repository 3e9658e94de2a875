// The C interface of the CPU kernels. Plain C types only: Python fills these structs through ctypes.
#pragma once
#include <cstdint>

// Goes up with every change of what the fields mean or of how pages are laid out.
#define KVQ_ABI 2

enum KvqCode : int32_t { KVQ_INTEGER = 0, KVQ_E4M3 = 1, KVQ_E5M2 = 2 };
enum KvqDtype : int32_t { KVQ_F32 = 0, KVQ_BF16 = 1, KVQ_F16 = 2 };

// Keys or values of one head in a page record. Offsets are bytes from the start of the head's part of the record.
struct KvqPart {
  int64_t first;        // bytes from the start of the record to head 0
  int64_t head_stride;  // bytes between heads
  int64_t scales;       // float16: [dim] per channel, or [dim / group][page_size] per token
  int64_t zeros;        // like scales; -1 if the format has no zero points
  int32_t code;         // KvqCode
  int32_t bits;         // 8, 4 or 2
  int32_t per_channel;
  int32_t group;        // channels per group of a per-token format
  int32_t dim;
  int32_t rotated;
  float middle;         // the code that decodes to the zero point
};

// Exact keys and values of consecutive tokens. Strides in elements; the last dimension is dense.
struct KvqSegment {
  const void* key;
  const void* value;
  const int32_t* first;   // [batch] the first token of the row
  const int32_t* count;   // [batch] how many tokens of it the row has
  const int32_t* column;  // [batch] the column of the first one
  int64_t key_stride[3];  // batch, head, token
  int64_t value_stride[3];
};

struct KvqAttend {
  const float* query;        // [batch, heads, rows, dim], scaled
  float* out;                // [batch, heads, rows, value dim]
  const uint8_t* pool;       // [slots, page_bytes]
  const int32_t* table;      // [batch, table_stride] slots of a row's pages
  const int32_t* num_pages;  // [batch]
  const int32_t* page_column;  // [batch] the column of a row's first page
  const float* mask;         // added to scores; null without one
  const float* sink_logits;  // [heads, rows]; null without them
  int64_t mask_stride[3];    // batch, head * rows, row; 0 where it is broadcast
  int64_t page_bytes;
  int64_t table_stride;
  int32_t batch, heads, rows, page_size, num_segments, dtype, num_threads;
  int32_t exact;             // float32 arithmetic throughout, whatever the variant
  float softcap;             // 0 for none
  KvqPart key, value;
  KvqSegment segment[3];
};

#define KVQ_EXPORT extern "C" __attribute__((visibility("default")))
