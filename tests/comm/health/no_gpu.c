/* A driver and an NCCL that do nothing, for torch's own process groups on a machine without a GPU.
   Loaded before libcudart and libnccl. HANG: no event is ever through. NCCL's calls are written to stderr. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOTHING(name, ...) int name(__VA_ARGS__) { return 0; }

int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaDriverGetVersion(int *version) { return *version = 13020, 0; }
int cudaGetDevice(int *device) { return *device = 0, 0; }
int cudaGetDeviceProperties(void *properties, int device) { return memset(properties, 0, 900), 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { return *value = 1, 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = 1ul << 34, 0; }
int cudaMalloc(void **memory, size_t size) { return *memory = malloc(size), 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return *event = (void *)8, 0; }
int cudaEventQuery(void *event) { return getenv("HANG") ? 600 : 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return *stream = (void *)16, 0; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { return *status = 0, 0; }
NOTHING(cudaSetDevice, int device)
NOTHING(cudaGetLastError, void)
NOTHING(cudaPeekAtLastError, void)
NOTHING(cudaEventDestroy, void *event)
NOTHING(cudaEventRecord, void *event, void *stream)
NOTHING(cudaEventRecordWithFlags, void *event, void *stream, unsigned flags)
NOTHING(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
NOTHING(cudaThreadExchangeStreamCaptureMode, int *mode)
NOTHING(cudaFree, void *memory)

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { return *flags = *is_active = 0, 0; }
int cuDriverGetVersion(int *version) { return *version = 13020, 0; }
int cuGetProcAddress(const char *name, void **function, int version, size_t flags) { return *function = 0, 500; }

int ncclGetVersion(int *version) { return *version = 23007, 0; }
int ncclGetUniqueId(void *id) { return memset(id, 1, 128), 0; }
int ncclCommInitRankConfig(void **comm, int size, struct { char id[128]; } id, int rank, void *config) {
  return *comm = malloc(64), 0;
}
int ncclCommAbort(void *comm) { return fprintf(stderr, "NCCL aborts\n"), 0; }
int ncclCommGetAsyncError(void *comm, int *error) { return *error = 0, 0; }
int ncclCommUserRank(void *comm, int *rank) { return *rank = 0, 0; }
int ncclCommCount(void *comm, int *size) { return *size = 1, 0; }
int ncclCommCuDevice(void *comm, int *device) { return *device = 0, 0; }
NOTHING(ncclAllReduce, void *from, void *to, size_t count, int dtype, int op, void *comm, void *stream)
NOTHING(ncclCommRegister, void *comm, void *buffer, size_t size, void **handle)
NOTHING(ncclCommDeregister, void *comm, void *handle)
NOTHING(ncclGroupStart, void)
NOTHING(ncclGroupEnd, void)
const char *ncclGetErrorString(int error) { return "an error"; }
const char *ncclGetLastError(void *comm) { return ""; }
