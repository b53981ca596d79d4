"""Both ways to say what a step made, one turned into the other."""

from collections.abc import Iterable

from phalanx.engine.messages import EngineCoreOutput, StepOutputs


def write_out(outputs: StepOutputs) -> list[EngineCoreOutput]:
    """One output for each request, also for those of which there is only a token to say."""
    plain = zip(outputs.request_ids, outputs.token_ids, strict=True)
    said = [
        EngineCoreOutput(request_id=request_id, new_token_ids=[token_id]) for request_id, token_id in plain
    ]
    names = [output.request_id for output in (*said, *outputs.others)]
    assert len(set(names)) == len(names), "a request stands there twice"
    return said + outputs.others


def pack(outputs: Iterable[EngineCoreOutput]) -> StepOutputs:
    """What says no more than one token goes into the columns. Each request may occur once."""
    packed = StepOutputs()
    for output in outputs:
        if _is_plain(output):
            packed.request_ids.append(output.request_id)
            packed.token_ids.extend(output.new_token_ids)
        else:
            packed.others.append(output)
    return packed


def _is_plain(output: EngineCoreOutput) -> bool:
    token_ids = output.new_token_ids
    return (
        output == EngineCoreOutput(request_id=output.request_id, new_token_ids=token_ids)
        and len(token_ids) == 1
    )
