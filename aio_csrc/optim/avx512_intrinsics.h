// The intrinsics of AVX-512 without the warnings of GCC 12 about its own _mm512_undefined_*() placeholders.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
