# Draws all_reduce.svg from all_reduce.dat in the current folder. Called by run.sh.
places = system("sed -n 's/^# group //p' all_reduce.dat") # near, far, or both
set terminal svg noenhanced size 500 * words(places),460 font "Helvetica,13" background "white"
set output "all_reduce.svg"
set multiplot layout 1,words(places) title "all_reduce of f32, two ranks: median time" font ",15"
set logscale xy
set xlabel "bytes per rank"
set ylabel "microseconds"
set xtics ("1 KiB" 1024, "16 KiB" 16384, "256 KiB" 262144, "" 1048576, "25 MiB" 26214400, "256 MiB" 268435456)
set format y "%g"
set xrange [512:500000000]
set yrange [0.05:200000]
set grid lc rgb "#dddddd"
set key top left Left reverse samplen 2
do for [place in places] {
    set title sprintf("cores %s each other", place eq "near" ? "near" : "far from")
    plot "all_reduce.dat" index "gloo ".place with points pt 5 ps 0.8 lc rgb "#999999" title "Gloo", \
         "" index "mpich ".place with linespoints pt 9 ps 0.7 lw 1.5 lc rgb "#e69f00" title "MPICH", \
         "" index "openmpi ".place with linespoints pt 11 ps 0.7 lw 1.5 lc rgb "#d55e00" title "Open MPI", \
         "" index "private ".place \
             with linespoints pt 6 ps 0.7 lw 1.5 lc rgb "#56b4e9" title "ddp, private memory", \
         "" index "group ".place \
             with linespoints pt 7 ps 0.7 lw 2 lc rgb "#0072b2" title "ddp, group memory", \
         "" index "bound ".place with points pt 1 ps 1.2 lw 2 \
             lc rgb "#000000" title "bare loops (memory bound)"
}
unset multiplot
