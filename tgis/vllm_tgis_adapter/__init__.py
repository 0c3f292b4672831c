"""Installed as `vllm_tgis_adapter` (setup.cfg), so that command lines of vllm-tgis-adapter start tgis."""
