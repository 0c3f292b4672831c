"""Everything that is known before the engine process starts: model files, tokenizer, limits, credentials."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from tgis import __version__
from tgis.config import Config
from tgis.errors import StartError
from tgis.frontend import request_log
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.tokenizer import Tokenizer
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.limits import adapter_store_options, engine_options, placeholder_id, request_limits
from tgis.models.convert.fast_tokenizer import TOKENIZER, ensure_tokenizer
from tgis.models.convert.gguf import ensure_directory
from tgis.models.convert.weights import ensure_weights, needs_conversion
from tgis.models.digest import deciding_files, digest_file
from tgis.models.files import (
    ModelFiles,
    eos_token_ids,
    find_directory,
    find_model,
    find_weights,
    is_encoder_decoder,
)
from tgis.security.bearer import TokenFile
from tgis.security.tls import Certificates, TlsFiles
from tgis.utils.thread_pool import LARGE_SIZE

log = logging.getLogger(__name__)

_ENGINES_WITHOUT_SAFETENSORS = ("fake", "hf_optimum_ort")


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a server starts with."""

    config: Config
    model: ModelFiles
    tokenizer: Tokenizer
    template_path: Path  # the directory of the chat template
    eos_ids: tuple[int, ...]
    limits: RequestLimits
    adapter_store: AdapterStoreOptions | None
    certificates: Certificates | None
    tokens: TokenFile | None

    def token_decoder(self) -> TokenDecoder:
        return TokenDecoder(
            self.tokenizer,
            encoder_decoder=is_encoder_decoder(self.model.config),
            output_special_tokens=self.config.output_special_tokens,
            eos_ids=frozenset(self.eos_ids),
        )

    def engine_options(self) -> EngineOptions:
        """The options that the engine process starts with."""
        ends = self.eos_ids, eos_token_ids(self.model)
        return engine_options(self.config, self.limits, self.model, *ends, self.adapter_store)

    async def file_digest(self) -> bytes:
        """The digest of the files that decide answers. Every byte is read, in the threads of the tokenizer."""
        path, engine, pool = self.model.path, self.config.engine, self.tokenizer.pool
        graphs = sorted(path.glob("**/*.onnx*")) if engine == "hf_optimum_ort" else []
        weights = () if engine == "fake" else graphs or find_weights(path)
        jobs = [partial(digest_file, file) for file in deciding_files(weights, path, self.template_path)]
        digests = [pool.run(LARGE_SIZE - 1, job) for job in jobs]  # runs them in parallel: none counts as a large job
        return hashlib.sha256(b"".join(await asyncio.gather(*digests))).digest()

    def with_fingerprint(self, info: EngineInfo, file_digest: bytes) -> EngineInfo:
        """The description of the engine with the fingerprint of its answers: with -batch at its end where they may
        depend on other requests in the batch.
        """
        arithmetic = f"{info.arithmetic} {self.config.add_special_tokens}".encode()
        digest = hashlib.sha256(file_digest + arithmetic).hexdigest()[:12]
        return msgspec.structs.replace(info, fingerprint=f"fp_{digest}{'' if info.invariant else '-batch'}")

    def limits_of(self, info: EngineInfo) -> RequestLimits:
        """The limits of requests once the engine has reported its own."""
        return replace(
            self.limits,
            placeholder_id=placeholder_id(self.model, self.eos_ids, info.input_vocab_size),
            max_request_tokens=info.max_request_tokens,
            max_positions=info.max_positions,
            input_vocab_size=info.input_vocab_size,
            vocab_size=info.vocab_size,
        )

    def with_safetensors(self) -> "Preparation":
        """Convert older weights, which may take minutes; StartError if that fails."""
        path, engine = self.model.path, self.config.engine
        has_graphs = engine == "hf_optimum_ort" and any(path.glob("**/*.onnx"))  # else hf_transformers takes its place
        if engine == "fake" or has_graphs:
            return self
        return replace(self, model=replace(self.model, path=ensure_weights(path, self.config.cache_dir)))


def prepare(config: Config) -> Preparation:
    """StartError if something is refused before the engine process looks at the weights."""
    for warning in config.warnings:
        log.warning("%s", warning)
    if not config.log_requests:
        logging.getLogger(request_log.__name__).setLevel(logging.WARNING)
    certificates, tokens = load_credentials(config)
    log.info("tgis %s, starting engine %s with model %s", __version__, config.engine, config.model_name)
    revision, hub_cache = config.revision, str(config.hub_cache)
    name = ensure_directory(config.model_name, config.cache_dir, revision, hub_cache)
    model = find_model(name, revision, hub_cache)
    if config.engine not in _ENGINES_WITHOUT_SAFETENSORS and not needs_conversion(model.path):
        find_weights(model.path)
    source = _tokenizer_files(config, model)
    directory = ensure_tokenizer(source, config.cache_dir)
    tokenizer = Tokenizer.load(directory, config.tokenization_workers, add_special_tokens=config.add_special_tokens)
    limits = request_limits(config, model)
    eos_ids = tuple(dict.fromkeys([*eos_token_ids(model), *tokenizer.eos_ids]))
    store = adapter_store_options(config, limits)
    return Preparation(config, model, tokenizer, source.path, eos_ids, limits, store, certificates, tokens)


def _tokenizer_files(config: Config, model: ModelFiles) -> ModelFiles:
    """The model's files, in the directory of TOKENIZER_NAME if that is another one."""
    if config.tokenizer_name in (None, config.model_name):
        return model
    try:
        path = find_directory(config.tokenizer_name, None, str(config.hub_cache), TOKENIZER)
    except StartError as error:
        raise StartError(f"TOKENIZER_NAME: {error}") from error
    return replace(model, path=path)


def load_credentials(config: Config) -> tuple[Certificates | None, TokenFile | None]:
    """Load certificates and tokens, None where TLS or authentication is off; OptionError for unusable files."""
    cert, key, client_ca = config.tls_cert_path, config.tls_key_path, config.tls_client_ca_cert_path
    files = TlsFiles(str(cert), str(key), str(client_ca) if client_ca else None)
    certificates = Certificates(files) if cert and key else None
    return certificates, TokenFile(config.auth_token_path) if config.auth_token_path else None
