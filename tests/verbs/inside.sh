# What comes before the command on the emulated machine: an adapter in software on a virtual network.
export UCX_IB_GID_INDEX=2 # its IPv6 address: by the IPv4 one, connections of UCX hang
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
ulimit -l unlimited # what is registered is pinned
set -e
ip link set lo up
ip link add verbs0 mtu 9000 type veth peer name verbs1 mtu 9000
ip address add 10.9.0.1/24 dev verbs0
ip -6 address add fd00:9::1/64 dev verbs0 nodad
ip link set verbs0 up
ip link set verbs1 up
rdma link add rxe0 type rxe netdev verbs0
set +e
