// One task: the running softmax of some query rows of one KV head over a part of its columns.

constexpr int kMostRows = 16;  // query rows of one task
constexpr int kMostLanes = 16;

// Its state, the scratch of one block of tokens, and how exact segments are added. Pages are added by PageReader.
struct Task {
  const KvqAttend& a;
  int64_t b, h;
  int first_row, rows, tokens_at_most;
  int fields, words_per_row, value_lanes, groups;
  std::vector<float> memory;
  float *query, *rotated_query, *folded, *offset;  // [rows][dim] three times, [rows]
  float *scores, *weights;      // [rows][tokens], [groups][rows][tokens]
  float *max, *sum, *plain;     // of the softmax so far: [rows] twice, [rows][value dim] of exact values
  float *packed;                // sums of page values so far: [rows][fields][lanes]
  float *page, *bias;           // the same of one page, and what its zero points add: [rows][groups]
  float *scales, *zeros;        // of one page, in float32

  Task(const KvqAttend& args, int64_t batch, int64_t head, int row, int count)
      : a(args), b(batch), h(head), first_row(row), rows(count) {
    tokens_at_most = int(std::max(align16(a.page_size), int64_t(128)));
    fields = 8 / a.value.bits;
    words_per_row = a.value.dim / fields;
    value_lanes = int(align16(words_per_row)) + kMostLanes;  // a load may begin at the last word
    groups = a.value.per_channel ? 1 : a.value.dim / a.value.group;
    const int dim = int(align16(a.key.dim)), value_dim = int(align16(a.value.dim));
    const int key_scales = a.key.per_channel ? dim : a.key.dim / a.key.group * a.page_size;
    const int value_scales = a.value.per_channel ? value_dim : groups * a.page_size;
    const int64_t scale_room = std::max(key_scales, value_scales);
    struct Block {
      float** at;
      int64_t size;
    };
    const int64_t n = rows, page_room = n * fields * value_lanes;
    const Block blocks[] = {{&query, n * dim}, {&rotated_query, n * dim}, {&folded, n * dim}, {&offset, n},
                            {&scores, n * tokens_at_most}, {&weights, n * groups * tokens_at_most},
                            {&max, n}, {&sum, n}, {&plain, n * value_dim}, {&packed, page_room}, {&bias, n * groups},
                            {&page, page_room}, {&scales, scale_room}, {&zeros, scale_room}};
    int64_t total = 0;
    for (const Block& block : blocks) total += align16(block.size);
    memory.assign(total, 0.f);
    float* next = memory.data();
    for (const Block& block : blocks) {
      *block.at = next;
      next += align16(block.size);
    }
    query_stride = dim;
    plain_stride = value_dim;
    load_query();
  }

  int query_stride, plain_stride;

  void load_query() {
    const int dim = a.key.dim;
    for (int r = 0; r < rows; r++) {
      const float* from = a.query + ((b * a.heads + h) * a.rows + first_row + r) * dim;
      float* q = query + r * query_stride;
      for (int d = 0; d < dim; d++) q[d] = from[d] * kLog2e;
      memcpy(rotated_query + r * query_stride, q, dim * sizeof(float));
      if (a.key.rotated) rotate(rotated_query + r * query_stride, dim);
      max[r] = kMinusInf;
    }
  }

  void add_sink_logits() {
    for (int r = 0; r < rows && a.sink_logits; r++) {
      max[r] = a.sink_logits[h * a.rows + first_row + r] * kLog2e;
      sum[r] = 1.f;
    }
  }

  // Softcap and mask, then weights relative to the running maximum: scores become weights. Returns false if every score
  // of every row is -inf, so that there is nothing to add.
  bool softmax(int tokens, int64_t column) {
    bool any = false;
    for (int r = 0; r < rows; r++) {
      float* s = scores + r * tokens_at_most;
      if (a.softcap > 0.f) {
        const float cap = a.softcap * kLog2e;
        for (int t = 0; t < tokens; t++) s[t] = cap * std::tanh(s[t] / cap);
      }
      if (a.mask) {
        const float* m = a.mask + b * a.mask_stride[0] + h * a.mask_stride[1] + (first_row + r) * a.mask_stride[2] + column;
        for (int t = 0; t < tokens; t++) s[t] = m[t] == kMinusInf ? kMinusInf : s[t] + m[t] * kLog2e;
      }
      const int padded = int(align16(tokens));
      std::fill(s + tokens, s + padded, kMinusInf);
      const float top = std::max(max[r], largest(s, padded));
      if (top == kMinusInf && !has_nan(s, padded)) {
        std::fill_n(s, padded, 0.f);
        continue;
      }
      any = true;
      rescale(r, top);
      Vf total = {};
      for (int t = 0; t < padded; t += LANES) {
        const Vf weight = exp2_nonpositive(load(s + t) - max[r]);
        store(s + t, weight);
        total += weight;
      }
      sum[r] += sum_of(total);
    }
    return any;
  }

  // The largest of n numbers, n a multiple of 16, NaN left aside.
  static float largest(const float* x, int n) {
    Vf top = load(x);
    for (int t = 0; t < n; t += LANES) top = load(x + t) > top ? load(x + t) : top;
    float best = kMinusInf;
    for (int j = 0; j < LANES; j++) best = top[j] > best ? top[j] : best;
    return best;
  }

  static bool has_nan(const float* x, int n) {
    bool found = false;
    for (int t = 0; t < n; t++) found |= x[t] != x[t];
    return found;
  }

  void rescale(int r, float top) {
    if (!(top > max[r])) return;
    const float keep = max[r] == kMinusInf ? 0.f : exp2_nonpositive(max[r] - top);
    max[r] = top;
    sum[r] *= keep;
    for (int d = 0; d < a.value.dim; d++) plain[r * plain_stride + d] *= keep;
    for (int d = 0; d < fields * value_lanes; d++) packed[r * fields * value_lanes + d] *= keep;
  }

  template <class LoadRow>
  void exact(const KvqSegment& s, LoadRow load_row) {
    const int count = s.count[b];
    std::vector<float> row(std::max(align16(a.key.dim), align16(a.value.dim)));
    for (int first = 0; first < count; first += tokens_at_most) {
      const int tokens = std::min(tokens_at_most, count - first);
      const int64_t token = s.first[b] + first;
      for (int t = 0; t < tokens; t++) {
        load_row(s.key, b * s.key_stride[0] + h * s.key_stride[1] + (token + t) * s.key_stride[2], a.key.dim, row.data());
        for (int r = 0; r < rows; r++) scores[r * tokens_at_most + t] = dot(query + r * query_stride, row.data(), a.key.dim);
      }
      if (!softmax(tokens, s.column[b] + first)) continue;
      for (int t = 0; t < tokens; t++) {
        load_row(s.value, b * s.value_stride[0] + h * s.value_stride[1] + (token + t) * s.value_stride[2], a.value.dim, row.data());
        for (int r = 0; r < rows; r++) {
          const float p = scores[r * tokens_at_most + t];
          float* out = plain + r * plain_stride;
          for (int d = 0; d < a.value.dim; d++) out[d] += p * row[d];
        }
      }
    }
  }

  // [rows][2 + 2 * value dim]: maximum, sum, exact part, part in the basis of the pages.
  void write(float* out) const {
    const int dim = a.value.dim;
    for (int r = 0; r < rows; r++, out += 2 + 2 * dim) {
      out[0] = max[r];
      out[1] = sum[r];
      memcpy(out + 2, plain + r * plain_stride, dim * sizeof(float));
      for (int d = 0; d < dim; d++) {
        const int f = d / words_per_row, w = d % words_per_row;
        out[2 + dim + d] = packed[(r * fields + f) * value_lanes + w];
      }
    }
  }
};
