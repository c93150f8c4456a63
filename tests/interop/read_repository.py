"""Reads a published repository with python-tuf (the reference client): refreshes all roles from the given root and
downloads every target that `catalog` and `rollout` list.

    pip install tuf
    python read_repository.py REPOSITORY_FOLDER [ROOT_FILE]

ROOT_FILE defaults to REPOSITORY_FOLDER/metadata/1.root.json. Prints one line per target; exit code 0 only if the
reference client accepted everything.
"""

import os
import pathlib
import sys
import tempfile

from tuf.api.exceptions import DownloadHTTPError
from tuf.api.metadata import Metadata
from tuf.ngclient import FetcherInterface, Updater

BASE = "http://repository/"


class Folder(FetcherInterface):
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def _fetch(self, url):
        path = self.folder / url.removeprefix(BASE)
        if not path.is_file():
            raise DownloadHTTPError(f"{path} not found", 404)
        return iter([path.read_bytes()])


def listed(folder, role):
    newest = max((folder / "metadata").glob(f"*.{role}.json"), key=lambda p: int(p.name.split(".")[0]))
    return sorted(Metadata.from_file(str(newest)).signed.targets)


def main():
    folder = pathlib.Path(sys.argv[1])
    root = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "metadata" / "1.root.json"
    with tempfile.TemporaryDirectory() as work:
        meta, target = os.path.join(work, "metadata"), os.path.join(work, "targets")
        os.makedirs(meta)
        os.makedirs(target)
        updater = Updater(
            metadata_dir=meta,
            metadata_base_url=BASE + "metadata/",
            target_dir=target,
            target_base_url=BASE + "targets/",
            fetcher=Folder(folder),
            bootstrap=root.read_bytes(),
        )
        updater.refresh()
        names = listed(folder, "catalog") + listed(folder, "rollout")
        for name in names:
            info = updater.get_targetinfo(name)
            if info is None:
                sys.exit(f"{name}: not found through the delegations")
            updater.download_target(info, os.path.join(target, "file"))
            print(f"ok {info.length:>12} {name}")
        print(f"{len(names)} targets accepted")


if __name__ == "__main__":
    main()
