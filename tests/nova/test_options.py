"""`berth nova settings` knows each option of a real Nova's scheduler."""

from __future__ import annotations

import json
import subprocess
from itertools import chain

from nova_scheduler.nova_conf import GROUPS, TRANSLATED, UNTRANSLATED, WEIGHT_CLASSES
from tests.kit.nova_peer import PYTHON, needs_nova

LISTED = """
import json, sys
from nova.conf import CONF
print(json.dumps({group: list(getattr(CONF, group)) for group in sys.argv[1:]}))
"""


@needs_nova
def test_each_option_of_novas_scheduler_is_translated_or_named() -> None:
    run = subprocess.run([PYTHON, "-c", LISTED, *GROUPS], capture_output=True, text=True, check=True)
    theirs = json.loads(run.stdout)

    ours = {name for name in chain(TRANSLATED, UNTRANSLATED, [WEIGHT_CLASSES]) if name[0] in GROUPS}
    assert ours == {(group, option) for group, options in theirs.items() for option in options}
