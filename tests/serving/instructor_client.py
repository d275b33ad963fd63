"""instructor, as its users call it, against the server whose address is the first argument; prints JSON."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Paint(BaseModel):
    """Paints a thing."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]
    twice: bool


def main() -> None:
    answers = {}
    with openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0) as api:
        for name in ("default", "TOOLS", "JSON_SCHEMA"):
            mode = {} if name == "default" else {"mode": instructor.Mode[name]}
            client = instructor.from_openai(api, **mode)
            painted = client.chat.completions.create(
                model="embedded",
                messages=[{"role": "user", "content": "Paint the door."}],
                response_model=Paint,
                max_retries=1,
                max_tokens=200,
                seed=3,
            )
            assert isinstance(painted, Paint)
            answers[name] = painted.model_dump()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
