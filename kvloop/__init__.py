"""kvloop: KV reuse across turns on prefill/decode-disaggregated vLLM."""
