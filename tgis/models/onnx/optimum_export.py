"""The child process of `tgis.models.onnx.export`: lets Optimum write ONNX graphs of a model.

`python optimum_export.py MODEL OUT [PACKAGES]`, all directories; Optimum and a transformers that it works with are in
PACKAGES, else where this Python has its own, perhaps without tgis. The decoder of an encoder-decoder gets what Optimum
leaves out, a mask of the output, and counts the places of its tokens by it: so rows whose outputs are not equally long
can share a pass.
"""

import inspect
import os
import sys
from typing import Any


def main() -> None:
    """Reads local files only and runs none of the model's code; any exception is for the parent to report."""
    model_path, out, *packages = sys.argv[1:]
    sys.path[:1] = packages  # instead of the folder of this file, whose modules have names that others have too
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the imports that follow
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
    """Let the decoder count places by its mask; whether that is possible."""
    decoder = model.get_decoder()
    if any(name.endswith("relative_attention_bias") for name, _ in decoder.named_modules()):
        return True  # counted from the newest token, in whose column all rows end
    if not hasattr(decoder, "embed_positions"):
        return False
    decoder.embed_positions = _mask_position_embedding(_position_table(model, model.config.max_position_embeddings))
    signature = inspect.signature(decoder.forward)

    def tell(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind(*args, **kwargs).arguments
        decoder.embed_positions.mask = given["attention_mask"]
        decoder.embed_positions.columns = given["input_ids"].shape[1]

    decoder.register_forward_pre_hook(tell, with_kwargs=True)
    return True


def _mask_position_embedding(table: Any) -> Any:
    """Stands for position embeddings; `table` [places, hidden]."""
    import torch  # noqa: PLC0415 - only where Optimum is

    class PlaceEmbeddings(torch.nn.Module):  # type: ignore[misc]
        mask: Any  # [rows, columns so far], of the next pass
        columns: Any  # that the pass adds

        def forward(self, *_: Any, **__: Any) -> Any:  # each architecture passes something else
            places = (self.mask.cumsum(-1) - 1).clamp(min=0)
            return table[places[:, -self.columns :]]

    return PlaceEmbeddings()


def _position_table(model: Any, count: int) -> Any:
    """What the decoder embeds for its first places, [count, hidden], as a pass over so many tokens shows."""
    import torch  # noqa: PLC0415 - only where Optimum is

    seen = []
    hook = model.get_decoder().embed_positions.register_forward_hook(lambda _m, _i, output: seen.append(output))
    token = 1 if model.config.pad_token_id == 0 else 0  # some give padding no place
    ids = torch.full((1, count), token)
    with torch.no_grad():
        model.base_model(input_ids=ids[:, :1], decoder_input_ids=ids, use_cache=False)
    hook.remove()
    return seen[0].reshape(count, -1).detach()


def _export_decoder_mask(model_type: str, task: str) -> None:
    """Let Optimum's decoders of this type take `decoder_attention_mask`, which it calls attention_mask in graphs."""
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
