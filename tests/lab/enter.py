"""``enter.py HOST TMPDIR COMMAND...``: run a command as if on HOST of the lab, see ``hosts.py``."""

import os
import sys

host, directory, *command = sys.argv[1:]
hosts = os.path.join(directory, "hosts")
with open(hosts, "w") as file:
    file.write("127.0.0.1 localhost\n10.77.0.1 mac1\n10.77.0.2 mac2\n")
os.environ["TMPDIR"] = directory
os.environ.pop("PRTE_MCA_prte_tmpdir_base", None)
script = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
os.execvp(
    "ip",
    [
        *("ip", "netns", "exec", f"shxlab-{host}"),
        *("unshare", "--uts", "--mount"),
        *("sh", "-c", script, host, hosts, *command),
    ],
)
