// One translation unit: torch's headers are parsed once, which is most of the build time.
// clang-format off
#include "real_kernels.cpp"  // first: of two registrations the later one counts
// clang-format on
#include "accounting.cpp"
#include "alias.cpp"
#include "allocators.cpp"
#include "bindings.cpp"
#include "clock.cpp"
#include "copy.cpp"
#include "device.cpp"
#include "fallback.cpp"
#include "kernels.cpp"
#include "streams.cpp"
#include "tracker.cpp"
