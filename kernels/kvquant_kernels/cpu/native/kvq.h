// The C interface of the CPU kernels. Plain C types only: Python fills these structs through ctypes.
#pragma once
#include <cstdint>

// Goes up with every change of what the fields mean or of how pages are laid out.
#define KVQ_ABI 5

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
  float middle;         // the code that decodes to the zero point
};

// Exact keys and values of consecutive tokens. Strides in elements, for batch, head and token; the last dimension is dense.
struct KvqSegment {
  const void* key;
  const void* value;
  int64_t key_stride[3];
  int64_t value_stride[3];
  int64_t tokens;
};

// Where a row's tokens are follows from where it starts and how many pages it has: sinks, pages, tail, chunk. A row without
// pages has no sinks either. The tail ends before column `settled`, where the chunk begins.
struct KvqAttend {
  // What is another with every call. Python writes it at once.
  const void* query;        // [batch, heads * n_rep, q_len, dim] of query_dtype; the last dimension is dense
  void* out;                // [batch, heads * n_rep, q_len, value dim] of query_dtype
  const float* mask;        // added to scores; null without one
  const float* sink_logits;  // [heads * n_rep]; null without them
  int64_t query_stride[3];  // batch, head, query; in elements
  int64_t mask_stride[3];   // batch, query head, query; 0 where it is broadcast
  KvqSegment chunk;
  int64_t tail_tokens;
  int32_t n_rep, q_len, settled, query_dtype, num_threads;
  float scale;              // of scores
  float softcap;            // 0 for none
  // What stays the same until pages are sealed, or the tail moves.
  int32_t batch, heads, page_size, dtype;
  int32_t exact;            // float32 arithmetic throughout, whatever the variant
  int32_t key_rotated, value_rotated;
  const uint8_t* pool;      // [slots, page_bytes]
  const int32_t* table;     // [batch, table_stride] slots of a row's pages
  const int32_t* num_pages;  // [batch]
  const int32_t* start;     // [batch] the column of a row's first token
  int64_t page_bytes;
  int64_t table_stride;
  KvqPart key, value;
  KvqSegment sinks;
  KvqSegment tail;  // with all of its room; tokens that are there: tail_tokens
};

// Keys or values of whole pages, between tensors and records.
struct KvqPages {
  void* states;           // [pages, heads, page_size, dim] of dtype; the last dimension is dense
  uint8_t* records;       // [pages, page_bytes]
  const float* shrink;    // for each range that clipping tries, what it cuts off; see Block::fit
  int64_t stride[3];      // of states: page, head, token; in elements
  int64_t page_bytes;
  int32_t pages, heads, page_size, dtype, num_threads, is_key, rotated;
  int32_t top;            // the largest code
  int32_t num_shrinks;    // 0: the whole range is taken
  int32_t norm;           // of the error that clipping minimizes: 2 or 4
  float half_width;       // of the grid
  KvqPart part;
};

#define KVQ_EXPORT extern "C" __attribute__((visibility("default")))
