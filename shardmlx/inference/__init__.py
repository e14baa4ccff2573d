"""Generation through the pipeline: chunked prefill, decode, sampling, KV caches."""
