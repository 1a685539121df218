// Whether products of tiles of bytes may be used in this process.
#pragma once

namespace mlx_gguf::cpu {

// Asks the system once for the room that tiles take in a thread's state.
bool has_amx();

} // namespace mlx_gguf::cpu
