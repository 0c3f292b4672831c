"""hf_optimum_ort: ONNX Runtime graphs behind the padded engine."""
