// Entry points of slots.cu beside those in interface.h: rounds of half the slots each, where copies of the
// next round overlap the product of the one before. Needs neither torch nor CUDA.
#pragma once

#include <cstdint>

#include "interface.h"

extern "C" {
int fp4_kernel_slots_plan_halves(const fp4::device::SlotPlan* plan, void* stream);
int fp4_kernel_slots_collect(const int* ids, const int* position, const void* made, void* rows, int pairs,
                             int64_t bytes, void* stream);
int fp4_kernel_side_fork(void* stream, void** side);
int fp4_kernel_side_join(void* stream);
}
