"""`python tests/support/merged_linear_rank.py STORE RANK MODEL...`: one of two ranks that merge and pack layers.

Prints a line for each model: how many of each, and the largest change of its logits.
"""

import os
import sys

import torch
from cpu_kernels import CACHE_DIR, CPU_ISA
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tgis.engines.distributed import ranks
from tgis.engines.kernels.cpu.library import load_kernels
from tgis.engines.kernels.cpu.linear import GemmSelector, pack_linears
from tgis.engines.loading.merged_linear import merge_linears

store, rank, *models = sys.argv[1:]
torch.set_grad_enabled(False)
fd = os.open(store, os.O_RDWR | os.O_CREAT)
ranks.use_interface("lo", "")
ranks.init_ranks(int(rank), 2, ranks.open_store(str(fd), 2))
ids = torch.tensor([[5, 9, 13, 2, 7]])
for path in models:
    shards = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=shards).eval()
    before = model(ids).logits
    merged = merge_linears(model, input_ids=ids[:, :2])
    gemms = GemmSelector(load_kernels(CPU_ISA, CACHE_DIR))
    pack_linears(model, gemms)
    packed = gemms.counts.total()
    print(merged, packed, (model(ids).logits - before).abs().max().item())
