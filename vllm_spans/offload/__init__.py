"""KV offload: published blocks in CPU memory and files, brought back block by block. See docs/offload.md."""
