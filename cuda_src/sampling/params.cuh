// Parameters that are arrays of one number per row, or one number for all.
#pragma once

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}
