"""Demo models, converted from registry packages, and a model directory for the engine `fake`."""
