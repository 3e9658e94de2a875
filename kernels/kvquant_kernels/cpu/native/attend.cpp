// One variant of the attention kernel: -DKVQ_VARIANT=name -DLANES=n, with the flags of its instruction set.
#include "attend.inl"
