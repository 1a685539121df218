#include "cuda/encode.h"

#include <map>
#include <string>

#include "gpu/nodes.h"
#include "mlx/backend/cuda/utils.h"
#include "mlx/ops.h"

namespace mlx_gguf {

array temporary(array a, mx::Stream s) {
  mx::cu::get_command_encoder(s).add_temporary(a);
  return a;
}

} // namespace mlx_gguf

namespace mlx_gguf::cuda {

namespace {

// In any of CUDA's descriptions of a launch.
template <typename Description>
void set_shape(Description& to, const Launch& launch) {
  to.gridDimX = launch.grid.x;
  to.gridDimY = launch.grid.y;
  to.gridDimZ = launch.grid.z;
  to.blockDimX = launch.block.x;
  to.blockDimY = launch.block.y;
  to.blockDimZ = launch.block.z;
  to.sharedMemBytes = static_cast<uint32_t>(launch.shared_bytes);
}

CUlaunchAttributeValue cluster_of(const Launch& launch) {
  CUlaunchAttributeValue out{};
  out.clusterDim.x = static_cast<unsigned>(launch.cluster);
  out.clusterDim.y = out.clusterDim.z = 1;
  return out;
}

void set_cluster(CUgraphNode node, const Launch& launch) {
  CUlaunchAttributeValue value = cluster_of(launch);
  check(
      cuGraphKernelNodeSetAttribute(
          node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value),
      "set a kernel's clusters");
}

// MLX keeps executable graphs and gives a graph of the same shape to one of
// them, which cannot change the clusters of a kernel. It tells graphs with a
// child apart by the child's clusters, so a kernel with clusters is a child.
void add_cluster_node(
    mx::cu::CommandEncoder& encoder,
    CUfunction kernel,
    const Launch& launch,
    std::vector<void*>& arguments) {
  CUDA_KERNEL_NODE_PARAMS params{};
  params.func = kernel;
  set_shape(params, launch);
  params.kernelParams = arguments.data();
  // One graph for a thread and size: only its parameters change, and MLX clones
  // it.
  struct Child {
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
  };
  thread_local std::map<int, Child> children;
  Child& child = children[launch.cluster];
  if (child.graph) {
    check(cuGraphKernelNodeSetParams(child.node, &params), "change a kernel");
  } else {
    check(cuGraphCreate(&child.graph, 0), "create a graph");
    check(
        cuGraphAddKernelNode(&child.node, child.graph, nullptr, 0, &params),
        "add a kernel");
    set_cluster(child.node, launch);
  }
  encoder.add_graph_node(
      child.graph, "(K" + std::to_string(launch.cluster) + ")", true);
}

thread_local CUstream at_once = nullptr;
thread_local CUgraph recorded = nullptr;
thread_local CUgraphNode last_recorded = nullptr;

void launch_at_once(
    CUfunction kernel, const Launch& launch, std::vector<void*>& arguments) {
  CUlaunchConfig config{};
  set_shape(config, launch);
  config.hStream = at_once;
  CUlaunchAttribute cluster{};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value = cluster_of(launch);
  config.attrs = &cluster;
  config.numAttrs = launch.cluster > 1 ? 1 : 0;
  check(
      cuLaunchKernelEx(&config, kernel, arguments.data(), nullptr),
      "launch a kernel");
}

// A kernel after the last one. Of an early one the edge says that it waits by
// itself.
void record(
    CUfunction kernel, const Launch& launch, std::vector<void*>& arguments) {
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_KERNEL;
  params.kernel.func = kernel;
  set_shape(params.kernel, launch);
  params.kernel.kernelParams = arguments.data();
  CUgraphEdgeData edge{};
  if (launch.early) {
    edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
  }
  CUgraphNode node = nullptr;
  check(
      cuGraphAddNode(
          &node,
          recorded,
          &last_recorded,
          &edge,
          last_recorded ? 1 : 0,
          &params),
      "add a kernel");
  if (launch.cluster > 1) {
    set_cluster(node, launch);
  }
  last_recorded = node;
}

} // namespace

AtOnce::AtOnce(CUstream stream) {
  at_once = stream;
}

AtOnce::~AtOnce() {
  at_once = nullptr;
}

Recorded::Recorded(CUgraph graph) {
  recorded = graph;
  last_recorded = nullptr;
}

Recorded::~Recorded() {
  recorded = nullptr;
}

bool starts_early() {
  return recorded && last_recorded && gpu().major >= 9;
}

array device_memory(int64_t nbytes, mx::Stream s) {
  auto words = static_cast<double>((nbytes + 7) / 8);
  return evaluate(mx::arange(0.0, words, 1.0, mx::int64, s));
}

void* address(const std::optional<array>& a) {
  return a && a->size() > 0 ? mx::gpu_ptr<void>(*a) : nullptr;
}

void enqueue(
    CUfunction kernel,
    const Launch& launch,
    std::vector<const std::optional<array>*> inputs,
    array& out,
    std::vector<void*> arguments,
    mx::Stream s) {
  if (at_once) {
    return launch_at_once(kernel, launch, arguments);
  }
  if (recorded) {
    return record(kernel, launch, arguments);
  }
  auto& encoder = mx::cu::get_command_encoder(s);
  for (const std::optional<array>* a : inputs) {
    if (*a && (*a)->size() > 0) {
      encoder.set_input_array(**a);
    }
  }
  encoder.set_output_array(out);
  if (launch.cluster > 1) {
    add_cluster_node(encoder, kernel, launch, arguments);
    return;
  }
  encoder.add_kernel_node_raw(
      kernel,
      launch.grid,
      launch.block,
      dim3(0, 0, 0),
      static_cast<uint32_t>(launch.shared_bytes),
      arguments.data());
}

} // namespace mlx_gguf::cuda
