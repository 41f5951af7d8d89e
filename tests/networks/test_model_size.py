"""Model size: networks have as many parameters as asked, and a size that none has is named."""

import jax
import pytest

from longhaul.driving.sim.observation import shapes
from longhaul.networks import actor_critic, model_size

DRIVING = shapes(8, 10, 200)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("deepset", 0.3), ("deepset", 25.0), ("mlp", 0.3)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)  # attention's in the daily test_ppo.py: latent, 0.3
            for each in (
                *(("deepset", size) for size in (1.0, 3.0, 10.0)),
                *(("wayformer", 0.3), ("wayformer", 10.0), ("latent", 3.0), ("mtr", 0.3), ("mlp", 25.0)),
            )
        ),
    ],
)
def test_a_model_size_gives_as_many_parameters_as_asked(kind, size):
    width, depth = model_size.width_and_depth(DRIVING, 91, size, torso=kind)
    network = actor_critic.actor_critic(DRIVING, 91, torso=kind, sizes=(width,) * depth)
    count = actor_critic.count(jax.eval_shape(network.init, jax.random.key(0)))
    assert abs(count / (size * 1e6) - 1.0) <= 0.1
    assert depth == {0.3: 2, 1.0: 3, 3.0: 4, 10.0: 6, 25.0: 9}[size]


def test_a_model_size_that_no_network_has_is_named():
    with pytest.raises(ValueError, match=r"model_size is 0; it must lie in 0.01 to 1000"):
        model_size.width_and_depth(DRIVING, 91, 0)
    with pytest.raises(ValueError, match=r"model_size is 0.01, and the nearest network .* has 0.0\d+ million"):
        model_size.width_and_depth(DRIVING, 91, 0.01, torso="mlp")
