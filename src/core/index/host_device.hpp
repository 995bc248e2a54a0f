// Marks index arithmetic that kernels call, too: NVRTC takes unmarked functions for host code and refuses them.
#pragma once

#ifdef __CUDACC__
#define QKV_HOST_DEVICE __host__ __device__
#else
#define QKV_HOST_DEVICE
#endif
