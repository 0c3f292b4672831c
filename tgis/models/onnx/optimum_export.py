"""The child process of `tgis.models.onnx.export`: Optimum writes ONNX graphs of a model.

`python optimum_export.py MODEL OUT [PACKAGES]`, all directories; Optimum and a compatible transformers are in PACKAGES,
else installed for this Python, which may lack tgis. The decoder of an encoder-decoder gets an attention mask of the
output, which Optimum leaves out, and derives position ids from it, so that outputs of different lengths can be batched.
"""

import inspect
import os
import sys
from typing import Any


def main() -> None:
    """Export with local files only, without running the model's code; the parent reports exceptions."""
    model_path, out, *packages = sys.argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))  # its modules would shadow others
    sys.path[:] = packages + [path for path in sys.path if path != here]
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the following imports
    from optimum.exporters.onnx import onnx_export_from_model  # noqa: PLC0415 - see above
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_pretrained(
        model_path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="float32"
    ).eval()
    task = "text2text-generation-with-past" if config.is_encoder_decoder else "text-generation-with-past"
    if config.is_encoder_decoder and _use_mask_positions(model):
        _export_decoder_mask(config.model_type, task)
    onnx_export_from_model(model, out, task=task)


def _use_mask_positions(model: Any) -> bool:
    """Make the decoder derive positions from its mask; returns whether that is possible."""
    decoder = model.get_decoder()
    if any(name.endswith("relative_attention_bias") for name, _ in decoder.named_modules()):
        return True  # relative to the newest token, whose column is the last of every row
    if not hasattr(decoder, "embed_positions"):
        return False
    decoder.embed_positions = _mask_position_embedding(_position_table(model, model.config.max_position_embeddings))
    signature = inspect.signature(decoder.forward)

    def set_mask(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind(*args, **kwargs).arguments
        decoder.embed_positions.mask = given["attention_mask"]
        decoder.embed_positions.columns = given["input_ids"].shape[1]

    decoder.register_forward_pre_hook(set_mask, with_kwargs=True)
    return True


def _mask_position_embedding(table: Any) -> Any:
    """Replaces the position embeddings; `table` [positions, hidden size]."""
    import torch  # noqa: PLC0415 - only where Optimum is

    class MaskPositionEmbedding(torch.nn.Module):  # type: ignore[misc]
        mask: Any  # [batch, length so far], set before each forward
        columns: Any  # new tokens of the forward

        def forward(self, *_: Any, **__: Any) -> Any:  # architectures pass different arguments
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
            return table[positions[:, -self.columns :]]

    return MaskPositionEmbedding()


def _position_table(model: Any, count: int) -> Any:
    """The decoder's embeddings of the first `count` positions, [count, hidden size], observed in a forward."""
    import torch  # noqa: PLC0415 - only where Optimum is

    seen = []
    hook = model.get_decoder().embed_positions.register_forward_hook(lambda _m, _i, output: seen.append(output))
    token = 1 if model.config.pad_token_id == 0 else 0  # some models give padding no position
    ids = torch.full((1, count), token)
    with torch.no_grad():
        model.base_model(input_ids=ids[:, :1], decoder_input_ids=ids, use_cache=False)
    hook.remove()
    return seen[0].reshape(count, -1).detach()


def _export_decoder_mask(model_type: str, task: str) -> None:
    """Make Optimum export `decoder_attention_mask` for this model type; it is named attention_mask in the graph."""
    from optimum.exporters.tasks import TasksManager  # noqa: PLC0415 - only where Optimum is

    kind = TasksManager.get_exporter_config_constructor("onnx", model_type=model_type, task=task).func
    plain = kind.inputs.fget

    def inputs(self: Any) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = plain(self)
        if "decoder_input_ids" in found:
            past = "past_decoder_sequence_length + " if self.use_past_in_inputs else ""
            found["decoder_attention_mask"] = {0: "batch_size", 1: f"{past}decoder_sequence_length"}
        return found

    kind.inputs = property(inputs)
    kind.PAD_ATTENTION_MASK_TO_PAST = True


if __name__ == "__main__":
    main()
