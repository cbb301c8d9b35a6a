"""How XLA tiled a matrix product, according to its backend configuration."""

from typing import Any

from bijax.hlo._module import Instruction, Module


def tile_of(module: Module, instruction: Instruction) -> str:
    """Returns the tile of a fusion, or the algorithm of a library call; empty if unspecified.

    Returns:
        "16x64x128" (M, N, K) of a GEMM fusion; "16x64, operands 16x32, 32x64" of one whose operands are tiled
        separately; "algorithm 3" of a library call.
    """
    for library in instruction.config.values():
        if isinstance(library, dict) and "selected_algorithm" in library:
            return f"algorithm {library['selected_algorithm']}"
        if isinstance(library, dict) and isinstance(chosen := library.get("algorithm"), dict):
            return f"algorithm {chosen.get('algo_id', '?')}"
    config = _gemm_config(instruction)
    if "block_m" in config:
        return "x".join(str(config.get(f"block_{dim}", "?")) for dim in "mnk")
    own = _output_tile(instruction)
    operands = [
        tile
        for name in instruction.called_as("calls")
        if name in module.computations
        for nested in module.computations[name].instructions.values()
        if (tile := _output_tile(nested))
    ]
    return f"{own}, operands {', '.join(operands)}" if operands else own


def split_k_of(module: Module, instruction: Instruction) -> int:
    """Returns the number of K splits of a GEMM fusion; 1 if it does not split K, or is not a GEMM fusion.

    Newer versions do not record it: then a sum over the first dimension after the product shows a split K.
    """
    if (said := _gemm_config(instruction).get("split_k")) is not None:
        return int(said)
    if "gemm" not in str(instruction.fusion_config.get("kind", "")) or not instruction.shapes:
        return 1
    parts = instruction.shapes[0].dims[:1]
    return parts[0] if parts and instruction.name in module.added_over_first_dimension else 1


def _gemm_config(instruction: Instruction) -> dict[str, Any]:
    config = instruction.fusion_config.get("triton_gemm_config", {})
    return config if isinstance(config, dict) else {}


def _output_tile(instruction: Instruction) -> str:
    block = instruction.fusion_config.get("block_level_fusion_config", {})
    tiles = block.get("output_tiles", []) if isinstance(block, dict) else []
    return " ".join("x".join(map(str, tile.get("sizes", ()))) for tile in tiles)
