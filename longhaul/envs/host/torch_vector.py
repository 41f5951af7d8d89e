"""Vector environments of torch tensors as a `HostVector`, by Isaac Lab's convention, copied as little as can be.

`step` gives (observations, rewards, terminated, time-outs, extras) as tensors; observations are a tensor, or a dict
whose "policy" is what the policy sees; an episode that ends is reset in the same step. Isaac Lab does not tell what
such a step led to: then `HostSpec.true_successors` is False, and `finals` has the observation that the step started
from. Whose extras have "final_obs" (or "final_observation"), all environments' in one tensor, is believed.

Tensors on the host are shared by DLPack; those on an accelerator are copied, once each way, but by `on_device`.
There arrays of JAX are the environment's tensors, and its actions are JAX's arrays, in the same memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from longhaul.envs.host.gymnasium_vector import Form, form
from longhaul.envs.host.vector import (
    DeviceStep,
    Finals,
    HostStep,
    Interval,
    Slot,
    check_action,
    no_finals,
    no_restore,
    no_state,
    slot,
    take,
    typed,
    write,
)
from longhaul.runtime.user_modules import load
from longhaul.spaces import Tree, mapped

POLICY = "policy"
"""The group of Isaac Lab's observations that the policy sees."""

FINAL = ("final_obs", "final_observation")


class TorchVector:
    """An environment of tensors. `final` is True where its extras have the observations to which ended steps led."""

    def __init__(self, inner: Any, form: Form, final: bool) -> None:
        self.spec = replace(form.spec, true_successors=final)
        self._form, self._inner, self._space = form, inner, inner.single_action_space
        self.worlds = self.columns = int(inner.num_envs)
        self._interval, self._none = Interval(self.spec, self.columns), no_finals(self.spec)
        self._before: Tree = None  # what the coming step starts from, where finals need it

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._interval = Interval(self.spec, self.columns)
        observation, _ = self._inner.reset(seed=seed)
        write(out.observation, self._read(observation))
        self._remember(out.observation)
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        import torch

        chosen = self._form.act(check_action(self.spec, self.columns, action))
        # DLPack gives nothing away that must not be written.
        actions = torch.from_dlpack(chosen if chosen.flags.writeable else chosen.copy())
        observation, reward, terminated, truncated, extras = self._inner.step(actions.to(self._inner.device))
        out = slot(self.spec, self.columns) if out is None else out
        write(out[1:4], tuple(_numpy(tensor) for tensor in (reward, terminated, truncated)))
        out.valid[:] = True
        ended = out.terminated | out.truncated
        self._interval.check(out.truncated)
        finals = self._none
        if ended.any():
            rows = np.flatnonzero(ended)
            last = self._read(_final(extras)) if self.spec.true_successors else self._before
            finals = Finals(rows.astype(np.int32), typed(self.spec, take(last, rows)), {})
        write(out.observation, self._read(observation))
        self._remember(out.observation)
        return HostStep(*out, finals)

    def begin_on_device(self, seed: int) -> Tree:
        """New episodes in all worlds -> observations, as arrays of JAX in the tensors' memory."""
        return self._shared(self._inner.reset(seed=seed)[0])

    def on_device(self, action: Any) -> DeviceStep:
        """One step without a copy through the host. `action`: an array of JAX on the environment's device.

        Tensors of another type than the spec says are converted where they are.
        """
        import torch

        tensor = _environment_actions(torch.from_dlpack(action), self._space)
        observation, reward, terminated, truncated, extras = self._inner.step(tensor)
        final = self._shared(_final(extras)) if self.spec.true_successors else None
        paid, flag = np.dtype(np.float32), np.dtype(bool)
        return DeviceStep(
            self._shared(observation), _array(reward, paid), _array(terminated, flag), _array(truncated, flag), final
        )

    def _shared(self, observation: Any) -> Tree:
        read = self._form.read(_seen(observation), {})
        return mapped(lambda leaf, tensor: _array(tensor, leaf.dtype), self.spec.observation, read)

    def _read(self, observation: Any) -> Tree:
        return self._form.read(mapped(_numpy, _seen(observation)), {})

    def _remember(self, observation: Tree) -> None:
        if not self.spec.true_successors:
            self._before = mapped(np.copy, observation)

    state, restore = no_state, no_restore

    def close(self) -> None:
        self._inner.close()


def torch(
    name: str, num_envs: int, seed: int, *, action_bound: float | None = None, max_steps: int | None = None,
    truncation_interval: int | None = None, final_observations: bool = False, **options: Any,
) -> TorchVector:  # fmt: skip
    """`name` is module:factory, called with the number of environments and the options.

    `final_observations`: the environment's extras have them. `action_bound`: of actions without bounds, as most of
    Isaac Lab's are. `max_steps` (default: the environment's `max_episode_length`) bounds an episode. Isaac Lab begins
    episodes at different places of their length, so that `truncation_interval` is 1 unless given.
    """
    worlds = load(name)(num_envs, **options)
    space = worlds.single_observation_space
    group = space[POLICY] if POLICY in getattr(space, "spaces", {}) else space
    limit = max_steps or getattr(worlds, "max_episode_length", None)
    spaces = form(
        group, worlds.single_action_space, limit=limit, interval=truncation_interval or 1, mask=None, bound=action_bound
    )
    return TorchVector(worlds, spaces, final_observations)


def _seen(observation: Any) -> Any:
    return observation[POLICY] if isinstance(observation, dict) and POLICY in observation else observation


def _final(extras: dict[str, Any]) -> Any:
    for key in FINAL:
        if key in extras:
            return _seen(extras[key])
    raise ValueError(f"extras have neither {' nor '.join(FINAL)}; leave the option final_observations away")


def _numpy(tensor: Any) -> np.ndarray:
    """The tensor's own memory where that is the host's, else a copy."""
    tensor = tensor.detach()
    return np.from_dlpack(tensor if tensor.device.type == "cpu" else tensor.cpu())


def _array(tensor: Any, dtype: np.dtype) -> Any:
    """The tensor as an array of JAX, in the tensor's memory where its type is `dtype`."""
    import jax
    import torch

    return jax.dlpack.from_dlpack(tensor.detach().to(getattr(torch, str(dtype))).contiguous())


def _environment_actions(action: Any, space: Any) -> Any:
    """Our actions, a tensor [B, ...], as the environment's `space` has them, on their device."""
    import torch

    shaped, start = action.reshape(len(action), *space.shape), np.asarray(vars(space).get("start", 0))
    if start.any():
        shaped = shaped + torch.as_tensor(start, device=action.device)
    return shaped.to(getattr(torch, str(np.dtype(space.dtype))))
