// One translation unit: torch's headers are parsed once, which is most of the build time.
#include "real_kernels.cpp"  // first: of two kernels for one operator, the one registered later counts

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
