"""The proof on a GPU: real vLLM for CUDA with kvloop in the path; see README.md."""
