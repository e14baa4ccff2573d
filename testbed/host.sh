#!/bin/sh
# host.sh NAME DIRECTORY KERNELS BYTECODE SEEN...: a host of the lab, see hosts.py. Runs in
# namespaces of its own for network, host name and mounts, and keeps them until its stdin is closed.
#
# Its /tmp is DIRECTORY/NAME; but for it and /dev/shm nothing can be written. SEEN lies in /tmp too,
# but is there on all hosts, as Python is. They share what takes long to compile anew: KERNELS,
# which MLX keeps in /tmp/mlx, and Python's BYTECODE, unless that is "".
set -e
name=$1 directory=$2 kernels=$3 bytecode=$4
shift 4
own=$directory/$name

hostname "$name"
ip link set lo up
mount --bind "$directory/hosts" /etc/hosts
# The interfaces of this network are in a new sysfs; cgroups stay.
mkdir "$own/cgroup"
mount --rbind /sys/fs/cgroup "$own/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$own/cgroup" /sys/fs/cgroup
umount -l "$own/cgroup"
rmdir "$own/cgroup"
mount -t tmpfs tmpfs /dev/shm

mkdir "$own/home" "$own/mlx"
mount --bind "$kernels" "$own/mlx"
for path; do
    mkdir -p "$own/${path#/tmp/}"
    mount --bind "$path" "$own/${path#/tmp/}"
    mount -o remount,bind,ro "$own/${path#/tmp/}"
done
if [ -n "$bytecode" ]; then
    case $bytecode in
    /tmp/*) there=$own/${bytecode#/tmp/} ;;
    *) there=$bytecode ;;
    esac
    mkdir -p "$bytecode" "$there"
    mount --bind "$bytecode" "$there"
fi
mount --rbind "$own" /tmp
mount -o remount,bind,ro /

echo up
exec cat >/dev/null
