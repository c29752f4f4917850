"""The block, the model and the head that the model families share. A family adds the layer of its blocks."""

import copy
import dataclasses
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn as nn
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from fla_npu.layers.attn import Attention
from fla_npu.layers.delta import DeltaLayer, log_uniform_rates, time_step_bias
from fla_npu.models.attnres import attention_residual
from fla_npu.models.cache_utils import Cache
from fla_npu.models.configuration_utils import FLAConfig, get_attention_spec
from fla_npu.models.generation_utils import FLAGenerationMixin
from fla_npu.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss, GatedMLP, RMSNorm
from fla_npu.modules.l2warp import l2_warp

logger = logging.getLogger(__name__)

CACHE = "cache" if "cache" in {f.name for f in dataclasses.fields(BaseModelOutputWithPast)} else "past_key_values"
"""What transformers calls the cache in outputs, and `generate` in its calls."""


def get_attention(config: FLAConfig, layer_idx: int) -> Attention | None:
    """The softmax attention that `config.attn` wants in a layer, or None."""
    spec = get_attention_spec(config.attn, layer_idx=layer_idx)
    if spec is None:
        return None
    return Attention(
        hidden_size=config.hidden_size,
        num_heads=spec["num_heads"],
        num_kv_heads=spec["num_kv_heads"],
        qkv_bias=spec["qkv_bias"],
        window_size=spec["window_size"],
        rope_theta=spec["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        layer_idx=layer_idx,
    )


def residual_parameters(config: FLAConfig) -> tuple[nn.Linear, nn.RMSNorm]:
    """Query and norm of an attention residual; queries start at zero, where all residuals weigh the same."""
    query = nn.Linear(config.hidden_size, 1, bias=False)
    query._is_attnres_proj = True  # type: ignore[assignment]
    return query, nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class FLABlock(GradientCheckpointingLayer):
    """A token mixer and a gated feed-forward network, each after a norm and around a residual stream."""

    def __init__(self, config: FLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = get_attention(config, layer_idx) or self.mixer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMLP(
            hidden_size=config.hidden_size,
            hidden_ratio=config.hidden_ratio,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            fuse_swiglu=config.fuse_swiglu,
        )
        if config.attnres_block_size is not None:
            self.attn_res_proj, self.attn_res_norm = residual_parameters(config)
            self.mlp_res_proj, self.mlp_res_norm = residual_parameters(config)

    @staticmethod
    @abstractmethod
    def mixer(config: Any, layer_idx: int) -> nn.Module:
        """The family's layer."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        attnres_states: Sequence[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Cache | None, Sequence[torch.Tensor] | None]:
        """The block's hidden states `[B, T, hidden]`, None, the cache, and with attention residuals the sums of the
        earlier blocks of sub-layers."""

        def mix(x: torch.Tensor) -> torch.Tensor:
            return self.attn(
                hidden_states=x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                output_attentions=output_attentions,
                **kwargs,
            )[0]

        if self.config.attnres_block_size is None:
            mixed = mix(self.attn_norm(hidden_states))
            x, residual = self.mlp_norm(mixed, residual=hidden_states, prenorm=True)
            return residual + self.mlp(x), None, past_key_values, None

        total: torch.Tensor | None = hidden_states
        if attnres_states is None:
            # The embeddings are the only residual yet: their mixture is themselves.
            x, attnres_states, total = self.attn_norm(hidden_states), [hidden_states], None
        else:
            x, attnres_states, total = self._mixture("attn", 2 * self.layer_idx, attnres_states, hidden_states)
        y = mix(x)
        total = y if total is None else total + y
        x, attnres_states, total = self._mixture("mlp", 2 * self.layer_idx + 1, attnres_states, total)
        y = self.mlp(x)
        return y if total is None else total + y, None, past_key_values, attnres_states

    def _mixture(
        self, name: str, index: int, states: Sequence[torch.Tensor], total: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None]:
        """The input of sub-layer `index`, the sums of earlier blocks, and the sum of the block at hand: None where a
        block starts, whose predecessor has then joined the others."""
        residuals = [*states, total]
        x = attention_residual(
            getattr(self, f"{name}_res_proj").weight,
            residuals,
            getattr(self, f"{name}_res_norm").weight,
            getattr(self, f"{name}_norm").weight,
            self.config.norm_eps,
        )
        starts = self.config.attnres_block_size is not None and index % self.config.attnres_block_size == 0
        return (x, residuals, None) if starts else (x, states, total)


class FLAPreTrainedModel(PreTrainedModel):
    """How parameters start, and where transformers finds embeddings and blocks."""

    config_class: type[PretrainedConfig]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embeddings"
    _is_stateful = True

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if isinstance(module, DeltaLayer) and hasattr(module, "A_log"):
            layer: Any = module
            low = self._lowest_rate(layer)
            rates = torch.zeros_like(layer.A_log) if low is None else log_uniform_rates(layer.A_log.numel(), low)
            fill_parameter(layer.A_log, rates)
            fill_parameter(layer.dt_bias, time_step_bias(layer.dt_bias.numel()))
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            if getattr(module, "_is_attnres_proj", False):
                nn.init.zeros_(module.weight)
            else:
                nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def _lowest_rate(self, layer: Any) -> float | None:
        """Initial decay rates are uniform between this and 16; all 1 for None."""
        return 0.0


def fill_parameter(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Set a parameter that no checkpoint has set; on the meta device there is nothing to set."""
    if not getattr(parameter, "_is_hf_initialized", False) and parameter.device.type != "meta":
        parameter.copy_(values)


class FLAModel(FLAPreTrainedModel):
    """Embeddings, blocks and a final norm."""

    block: ClassVar[type[GradientCheckpointingLayer]]

    def __init__(self, config: FLAConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([self.block(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        if config.attnres_block_size is not None:
            self.res_proj, self.res_norm = residual_parameters(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...] | BaseModelOutputWithPast:
        """Hidden states of tokens.

        Args:
            input_ids: `[B, T]`; or instead
            inputs_embeds: `[B, T, hidden]`.
            attention_mask: `[B, S]`, 0 at padding; S counts the cached tokens and these.
            past_key_values: a `Cache` with earlier tokens, which these are added to; `cache` is its name in newer
                versions of transformers.
            use_cache: return a cache; by default what the configuration says, and not in training.
            output_attentions: ignored with a warning.
            output_hidden_states, return_dict: as in transformers.
            **kwargs: `cu_seqlens` `[N + 1]`, bounds of the sequences packed in a batch of one. Others are ignored, as
                in FLA.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`; training with attention residuals and
                reentrant gradient checkpoints, which handle no gradients of tensors in lists.
            TypeError: a cache of another library.
        """
        past_key_values = _given_cache(past_key_values, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if output_attentions:
            logger.warning("%s has no attention weights to return", type(self).__name__)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and self.gradient_checkpointing and self.training:
            logger.warning("use_cache=True is ignored: gradient checkpointing would run every layer twice on the cache")
            use_cache, past_key_values = False, None
        if self.config.attnres_block_size is not None:
            self._refuse_reentrant_checkpoints()
        if use_cache and not isinstance(past_key_values, Cache):
            past_key_values = Cache.from_legacy_cache(past_key_values)

        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        all_hidden_states = [hidden_states]
        attnres_states: Sequence[torch.Tensor] | None = None
        for layer in self.layers:
            hidden_states, _, past_key_values, attnres_states = layer(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                attnres_states=attnres_states,
                **kwargs,
            )
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
        if attnres_states is None:
            hidden_states = self.final_norm(hidden_states)
        else:
            hidden_states = attention_residual(
                self.res_proj.weight,
                [*attnres_states, hidden_states],
                self.res_norm.weight,
                self.norm.weight,
                self.config.norm_eps,
            )
        all_hidden_states[-1] = hidden_states
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            **{CACHE: past_key_values},
        )
        return output if _returns_dict(self, return_dict) else output.to_tuple()

    @property
    def final_norm(self) -> RMSNorm:
        """The norm after the last block."""
        return self.norm

    def _refuse_reentrant_checkpoints(self) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        for layer in self.layers:
            # transformers keeps torch's `checkpoint` here with the options it was enabled with.
            options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
            # torch takes None, its default, for True.
            if layer.gradient_checkpointing and options.get("use_reentrant") is not False:
                raise ValueError(
                    "attnres_block_size does not go with reentrant gradient checkpoints, which handle no gradients of "
                    "tensors in lists: call gradient_checkpointing_enable({'use_reentrant': False})"
                )


class FLAForCausalLM(FLAPreTrainedModel, FLAGenerationMixin):
    """A model with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    model_class: ClassVar[type[FLAModel]]

    def __init__(self, config: FLAConfig) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion: nn.Module | None = None
        self.post_init()

    def get_decoder(self) -> nn.Module:
        return self.base_model

    def set_decoder(self, decoder: FLAModel) -> None:
        setattr(self, self.base_model_prefix, decoder)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor | None = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...] | CausalLMOutputWithPast:
        """Logits of the next tokens, and with labels their loss.

        Args:
            labels: `[B, T]`, the tokens themselves: they are moved by one here. -100 does not count. The labels of
                packed sequences should be -100 at the first token of each.
            logits_to_keep: only compute the logits of this many last tokens, or of those at these indices; of all for
                0 or None, and with labels. `num_logits_to_keep` is its older name.
            num_items_in_batch: divide the summed loss by this; by the number of labels that count when None.
            Others as in the model's `forward`.

        Returns:
            Loss, logits `[B, T, vocabulary]`, cache and hidden states. There are no logits where a loss was computed
            without ever holding all of them.
        """
        if "num_logits_to_keep" in kwargs:
            logits_to_keep = kwargs.pop("num_logits_to_keep")
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=_given_cache(past_key_values, kwargs),
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss: torch.Tensor | None = None
        logits: torch.Tensor | None = None
        if labels is None:
            if isinstance(logits_to_keep, torch.Tensor):
                hidden_states = hidden_states[:, logits_to_keep]
            elif logits_to_keep:
                hidden_states = hidden_states[:, -logits_to_keep:]
            logits = self.lm_head(hidden_states)
        else:
            loss, logits = self._loss_and_logits(hidden_states, labels, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE: outputs.get(CACHE)},
        )
        return output if _returns_dict(self, return_dict) else output.to_tuple()

    def _fuses_head_and_loss(self) -> bool:
        """Whether the loss is computed without the logits."""
        return getattr(self.config, "fuse_linear_cross_entropy", False)

    def _loss_and_logits(
        self, hidden_states: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fused = self._fuses_head_and_loss()
        reduction = "mean" if num_items_in_batch is None else "sum"
        criterion: Any
        if self.criterion is not None:
            criterion = self.criterion
            if num_items_in_batch is not None:
                if not hasattr(criterion, "reduction"):
                    raise ValueError("a criterion needs an attribute `reduction` to be used with num_items_in_batch")
                criterion = copy.copy(criterion)
                criterion.reduction = reduction
        elif fused:
            criterion = FusedLinearCrossEntropyLoss(use_l2warp=self.config.use_l2warp, reduction=reduction)
        elif self.config.fuse_cross_entropy:
            criterion = FusedCrossEntropyLoss(reduction=reduction)
        else:
            criterion = nn.CrossEntropyLoss(reduction=reduction)

        labels = labels.to(hidden_states.device)
        targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], criterion.ignore_index)], dim=1)
        logits: torch.Tensor | None = None
        if fused:
            loss = criterion(hidden_states, targets, self.lm_head.weight, self.lm_head.bias)
        else:
            logits = self.lm_head(hidden_states)
            loss = criterion(logits.flatten(0, 1), targets.flatten())
            if self.config.use_l2warp:
                loss = l2_warp(loss, logits)
        if num_items_in_batch is not None:
            if isinstance(num_items_in_batch, torch.Tensor):
                num_items_in_batch = num_items_in_batch.to(loss.device)
            loss = loss / num_items_in_batch
        return loss, logits


def _given_cache(past_key_values: Any, kwargs: dict[str, Any]) -> Any:
    """The cache under either of its names; `cache` is taken out of `kwargs`."""
    cache = kwargs.pop("cache", None)
    if cache is not None and past_key_values is not None:
        raise ValueError("pass one of cache and past_key_values, which are the same")
    return past_key_values if cache is None else cache


def _returns_dict(model: FLAPreTrainedModel, return_dict: bool | None) -> bool:
    return bool(model.config.return_dict if return_dict is None else return_dict)
