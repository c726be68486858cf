"""The head of a language model and its loss, chunk by chunk over the tokens: only one chunk's logits exist at a time."""

from graphacc.passes.loss_chunks.attach import ChunkReport, chunk_pass, mark_heads_pass, needs_chunks
from graphacc.passes.loss_chunks.find import Refused, Region, find_heads, find_region
from graphacc.passes.loss_chunks.split import in_chunks

__all__ = ["ChunkReport", "Refused", "Region", "chunk_pass", "find_heads", "find_region", "in_chunks", "mark_heads_pass", "needs_chunks"]
