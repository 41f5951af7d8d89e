"""Width and depth by a model's size."""

import jax
import pytest

from longhaul.driving.sim.observation import shapes
from longhaul.networks import actor_critic, sizing

DRIVING = shapes(8, 10, 200)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("wayformer", size) for size in (0.3, 1.0, 3.0, 10.0, 25.0)),
        *((kind, size) for kind in ("latent", "mtr") for size in (0.3, 3.0, 25.0)),
        *((kind, size) for kind in ("deepset", "mlp") for size in (0.3, 25.0)),
    ],
)
def test_the_dial_gives_as_many_parameters_as_asked(kind, size):
    shape = sizing.shape(DRIVING, 91, size, torso=kind)
    network = actor_critic.actor_critic(DRIVING, 91, torso=kind, sizes=(shape.width,) * shape.depth)
    count = actor_critic.count(jax.eval_shape(network.init, jax.random.key(0)))
    assert abs(count / (size * 1e6) - 1.0) <= 0.1
    assert shape.depth == {0.3: 2, 1.0: 3, 3.0: 4, 10.0: 6, 25.0: 9}[size]


def test_the_dial_names_sizes_that_it_can_not_give():
    with pytest.raises(ValueError, match=r"model_size is 0; it must lie in 0.01 to 1000"):
        sizing.shape(DRIVING, 91, 0)
    with pytest.raises(ValueError, match=r"model_size is 0.01, and the nearest network .* has 0.0\d+ million"):
        sizing.shape(DRIVING, 91, 0.01, torso="mlp")
