"""Calls made as one: what each gets is what it would have got alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[diffusion]")
pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.batch import Call, Merged  # noqa: E402
from stages.diffusion.rotary import make_real  # noqa: E402
from tests.stages.diffusion.tiny import qwenimage  # noqa: E402


def test_text_that_has_to_be_padded_may_be_padded_further() -> None:
    torch.manual_seed(0)
    module = qwenimage().transformer.eval()

    def call(tokens: int) -> Call:
        given = {"hidden_states": torch.randn(1, 16, 16), "encoder_hidden_states": torch.randn(1, tokens, 16), "timestep": torch.rand(1)}
        return Call(module, (), {**given, "encoder_hidden_states_mask": None, "img_shapes": [[(1, 4, 4)]], "return_dict": False})

    with torch.no_grad():
        calls = [call(3), call(20)]
        merged = Merged(calls, text_multiple=16)
        assert merged.kwargs["encoder_hidden_states"].shape == (2, 32, 16)
        for got, alone in zip(merged.split(module(**merged.kwargs)), calls, strict=True):
            torch.testing.assert_close(got[0], module(**alone.kwargs)[0], rtol=0, atol=1e-5)
        alike = Merged([call(20), call(20)], text_multiple=16)
        assert alike.kwargs["encoder_hidden_states"].shape == (2, 20, 16)
        assert alike.kwargs["encoder_hidden_states_mask"] is None


def test_real_rotary_tables_turn_as_complex_ones_do() -> None:
    torch.manual_seed(0)
    module = qwenimage().transformer.eval()
    given = {"hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 5, 16), "timestep": torch.rand(2)}
    asked = {**given, "img_shapes": [[(1, 4, 4)]] * 2, "return_dict": False}
    with torch.no_grad():
        before = module(**asked)[0]
        make_real(module)
        assert not module.pos_embed([[(1, 4, 4)]], max_txt_seq_len=5, device=torch.device("cpu"))[0].is_complex()
        torch.testing.assert_close(module(**asked)[0], before, rtol=0, atol=1e-5)
        other = qwenimage().transformer.eval()  # which was not asked to
        assert other.pos_embed([[(1, 4, 4)]], max_txt_seq_len=5, device=torch.device("cpu"))[0].is_complex()
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(other(**asked)[0], before, rtol=0, atol=1e-5)
