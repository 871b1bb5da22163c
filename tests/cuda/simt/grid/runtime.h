// The runtime's calls that the sources make: memory is the CPU's.
#pragma once

using cudaError_t = int;
using cudaStream_t = simt::Stream*;
using cudaEvent_t = struct FakeEvent*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;
enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorNotSupported = 801,
  cudaErrorCooperativeLaunchTooLarge = 720
};
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };
enum { cudaStreamNonBlocking, cudaEventDisableTiming, cudaStreamCaptureModeThreadLocal };
enum { cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
struct cudaFuncAttributes {};

constexpr int kFakeSms = 12;
void* fake_map_encoder();  // in cuda.h

inline const char* cudaGetErrorString(cudaError_t) { return "fake error"; }
inline cudaError_t cudaGetLastError() { return 0; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, 0; }
inline cudaError_t cudaSetDevice(int) { return 0; }
inline cudaError_t cudaDeviceSynchronize() { return 0; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, int) { return 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = simt::num_sms() > 0 ? simt::num_sms() : kFakeSms;
  return 0;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) { return *a = *b = 0; }
constexpr uint32_t kUnwritten = 0xeeeeeeee;  // what every word of new memory holds
template <class T>
cudaError_t cudaMalloc(T** to, size_t bytes) {
  *to = static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(static_cast<void*>(*to), kUnwritten & 0xff, bytes);
  return 0;
}
// What initcheck reports on a GPU ends the program here: the host copies words that nothing wrote.
inline void check_written(const void* from, size_t bytes) {
  const uint32_t* const words = static_cast<const uint32_t*>(from);
  const size_t unwritten = std::count(words, words + bytes / sizeof *words, kUnwritten);
  if (unwritten == 0) return;
  std::fprintf(stderr, "the host copies %zu words that nothing has written, of %zu\n", unwritten,
               bytes / sizeof *words);
  std::_Exit(9);
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return 0;
}
inline cudaError_t cudaMemset(void* to, int byte, size_t bytes) {
  std::memset(to, byte, bytes);
  return 0;
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  stream->push([=] { std::memset(to, byte, bytes); });
  return 0;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  if (kind == cudaMemcpyDeviceToHost) check_written(from, bytes);
  std::memcpy(to, from, bytes);
  return 0;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int,
                                   cudaStream_t stream) {
  stream->push([=] { std::memcpy(to, from, bytes); });
  return 0;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, int, int) {
  *stream = new simt::Stream;
  return 0;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return 0;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->synchronize();
  return 0;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, int) { return 0; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) { return 0; }
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return 0; }
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, int) { return 0; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return 0; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return 0; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return 0; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, int) { return 0; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return 0; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return 0; }
enum { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args...),
                               const Args&... args) {
  simt::Launch launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
  launch.cluster = config->attrs[0].val.clusterDim.y;
  launch.run(kernel, args...);
  return 0;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return 0;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* result) {
  *entry = fake_map_encoder();
  *result = cudaDriverEntryPointSuccess;
  return 0;
}
