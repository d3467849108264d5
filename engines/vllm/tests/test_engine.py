"""What the other tests rely on: vLLM's engine for the CPU answers with the real model."""

from __future__ import annotations

from vllm_engine import opened


class TestEnginesOfVllm:
    def test_one_after_another_in_a_process_answers_with_the_real_model(self) -> None:
        found = []
        for _ in range(2):
            with opened() as engine:
                tokenizer = engine.llm.get_tokenizer()
                prompt = tokenizer.encode("The capital of France is")
                found.append(tokenizer.decode(engine.answer(prompt, 4).tokens))

        assert found[0].startswith(" Paris")
        assert found[0] == found[1]
