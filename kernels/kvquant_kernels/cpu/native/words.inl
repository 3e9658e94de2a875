// Codes and scales of one block, to and from their places in a record. See layout.py.

inline uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}

inline void store_word(uint8_t* p, uint32_t word) { memcpy(p, &word, 4); }

// Keys: calls f(place of a word in the record, place of the codes of its first field, distance to those of the next). The
// codes of a word's four bytes lie side by side.
template <class F>
inline void for_each_key_word(const Block& b, int fields, F f) {
  for (int block = 0; block < b.tokens / (kWordLanes * fields); block++)
    for (int i = 0; i < b.dim / 4; i++)
      for (int lane = 0; lane < kWordLanes; lane++)
        f(4 * ((block * (b.dim / 4) + i) * kWordLanes + lane), (block * fields * kWordLanes + lane) * b.dim + 4 * i, kWordLanes * b.dim);
}

// Values: calls f(place of the first of `count` words, place of the codes of their first byte and field, count, distance to
// the codes of the next field). The codes of a word's four bytes are one token apart.
template <class F>
inline void for_each_value_run(const Block& b, int fields, F f) {
  const int group = b.p.part.per_channel ? b.dim : b.p.part.group, words = group / fields;
  int at = 0;
  for (int first = 0; first < b.dim; first += group)
    for (int w = 0; w < words; w += kWordLanes)
      for (int row = 0; row < b.tokens / 4; row++) {
        const int count = std::min(kWordLanes, words - w);
        f(4 * at, 4 * row * b.dim + first + w, count, words);
        at += count;
      }
}

template <int BITS>
void write_words(const Block& b, uint8_t* record) {
  constexpr int kFields = 8 / BITS;
  const uint8_t* codes = b.codes.data();
  if (b.p.is_key)
    return for_each_key_word(b, kFields, [&](int at, int code, int next_field) {
      uint32_t word = load_word(codes + code);
      for (int f = 1; f < kFields; f++) word |= load_word(codes + code + f * next_field) << (BITS * f);
      store_word(record + at, word);
    });
  for_each_value_run(b, kFields, [&](int at, int code, int count, int next_field) {
    uint32_t words[kWordLanes] = {};
    for (int e = 0; e < 4; e++)
      for (int f = 0; f < kFields; f++)
        for (int i = 0; i < count; i++)
          words[i] |= uint32_t(codes[code + e * b.dim + f * next_field + i]) << (8 * e + BITS * f);
    memcpy(record + at, words, 4 * count);
  });
}

template <int BITS>
void read_words(Block& b, const uint8_t* record) {
  constexpr int kFields = 8 / BITS;
  constexpr uint32_t kMask = (1u << BITS) - 1;
  uint8_t* codes = b.codes.data();
  if (b.p.is_key)
    return for_each_key_word(b, kFields, [&](int at, int code, int next_field) {
      const uint32_t word = load_word(record + at);
      for (int f = 0; f < kFields; f++) store_word(codes + code + f * next_field, word >> (BITS * f) & kMask * 0x01010101u);
    });
  for_each_value_run(b, kFields, [&](int at, int code, int count, int next_field) {
    uint32_t words[kWordLanes] = {};
    memcpy(words, record + at, 4 * count);
    for (int e = 0; e < 4; e++)
      for (int f = 0; f < kFields; f++)
        for (int i = 0; i < count; i++)
          codes[code + e * b.dim + f * next_field + i] = uint8_t(words[i] >> (8 * e + BITS * f) & kMask);
  });
}

template <class F>
void with_bits(const Block& b, F f) {
  if (b.p.part.bits == 8) return f(Int<8>());
  if (b.p.part.bits == 4) return f(Int<4>());
  f(Int<2>());
}

// The place of a group's scale among those of the record: [dim], or [dim / group][tokens].
inline int64_t place_of(const Block& b, int g) {
  if (b.p.part.per_channel) return g;
  const int groups = b.dim / b.group_size;
  return int64_t(g % groups) * b.tokens + g / groups;
}

void write_block(const Block& b, uint8_t* record) {
  with_bits(b, [&](auto bits) { write_words<bits.value>(b, record); });
  uint16_t *scales = (uint16_t*)(record + b.p.part.scales), *zeros = (uint16_t*)(record + b.p.part.zeros);
  for (int g = 0; g < b.num_groups; g++) {
    scales[place_of(b, g)] = float_to_half(b.scale[g]);
    if (!b.is_symmetric()) zeros[place_of(b, g)] = float_to_half(b.zero[g]);
  }
}

void read_block(Block& b, const uint8_t* record) {
  with_bits(b, [&](auto bits) { read_words<bits.value>(b, record); });
  const uint16_t *scales = (const uint16_t*)(record + b.p.part.scales), *zeros = (const uint16_t*)(record + b.p.part.zeros);
  for (int g = 0; g < b.num_groups; g++) {
    b.scale[g] = half_to_float(scales[place_of(b, g)]);
    b.zero[g] = b.is_symmetric() ? -0.f : half_to_float(zeros[place_of(b, g)]);
  }
}
