// One variant of sealing and restoring pages: -DKVQ_VARIANT=name -DLANES=n, with the flags of its instruction set, and with
// -ffp-contract=off: what is stored must be the codec's numbers to the bit.
#include "seal.inl"
