// KVQ_NAME(f) is f with the variant's name behind it.
#define KVQ_PASTE2(a, b) a##b
#define KVQ_PASTE(a, b) KVQ_PASTE2(a, b)
#define KVQ_NAME(name) KVQ_PASTE(name, KVQ_VARIANT)
