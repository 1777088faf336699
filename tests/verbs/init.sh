#!/bin/busybox sh
# The first process of the emulated machine: it makes a root of the other machine's, read-only below a layer in memory,
# with the unpacked packages between, and runs the job there. Its own messages go to the console.

b=/bin/busybox
end() { echo "$1"; echo o >/new/proc/sysrq-trigger; $b sleep 60; }

$b mkdir -p /new/proc && $b mount -t proc proc /new/proc
$b mount -t devtmpfs dev /dev
while read -r module; do
    $b insmod "/modules/$module.ko" || echo "could not load $module"
done </modules/order

options=trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro
$b mount -t 9p -o $options host /host || end "no root of the host"
$b mount -t 9p -o $options tree /tree || end "no packages"
$b mount -t tmpfs -o size=75% memory /rw && $b mkdir /rw/upper /rw/work
$b umount /new/proc
$b mount -t overlay -o lowerdir=/tree:/host,upperdir=/rw/upper,workdir=/rw/work overlay /new || end "no overlay"

$b mount -t proc proc /new/proc
$b mount -t sysfs sys /new/sys
$b mount -t devtmpfs dev /new/dev
$b mkdir -p /new/dev/shm /new/dev/pts
$b mount -t tmpfs shm /new/dev/shm
$b mount -t devpts pts /new/dev/pts
for link in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
    $b ln -s "${link#*:}" "/new/dev/${link%%:*}"
done
$b cp /job /new/dev/shm/job

$b stty -F /dev/ttyS1 raw -echo
$b chroot /new /bin/bash /dev/shm/job </dev/null >/dev/ttyS1 2>&1
end "the command ended with $?"
