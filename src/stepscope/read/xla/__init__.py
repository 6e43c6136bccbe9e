"""What torch_xla writes as text: metrics reports, logs of XLA_METRICS_FILE with steps, debug logs of PT_XLA_DEBUG."""
