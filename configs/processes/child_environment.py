"""The environment variables that programs of others get: agents, and what a check tries out.

Used by `agents.external` and `mocked_server.check.trial`. Invariant: no key or token of the operator's reaches such a
program unless its name is given.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

PASSED_ON = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TEMP", "TMP", "TZ", "LANG", "LANGUAGE", "TERM",
    "COLORTERM", "NO_COLOR", "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "PYENV_ROOT", "PYENV_VERSION",
    "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
    "NODE_PATH", "NVM_DIR", "JAVA_HOME", "GOPATH", "GOROOT", "CARGO_HOME", "RUSTUP_HOME",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
})  # fmt: skip
"""Variables by which programs find themselves, their files, their language's parts and their user's certificates."""
PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
"""Written in small or in capital letters."""


def clean_environment(extra: Mapping[str, str], *, named: Sequence[str] = ()) -> dict[str, str]:
    """The part of this process's environment that programs need to run (`PASSED_ON`) and that is `named`; plus `extra`.

    The rest stays here: other people's programs have no use for our keys and tokens, nor for what would put the checkout on their
    import path. A proxy's address that holds a password is passed on only where it is named.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in named
        or name in PASSED_ON
        or name.startswith("LC_")
        or (name.lower() in PROXIES and "@" not in value)
    }
    return {**kept, **extra}


# The folder of our packages, for processes that Ray starts: they import them from any working directory.

ROOT = Path(__file__).resolve().parent.parent


def python_path() -> str:
    """PYTHONPATH with the checkout first; as it is where we are installed: what lies in site-packages is found without it, and
    before the standard library it does not belong."""
    inherited = os.environ.get("PYTHONPATH", "")
    if ROOT in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        return inherited
    return os.pathsep.join(filter(None, [str(ROOT), inherited]))
